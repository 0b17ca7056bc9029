// Owns the waterfall of one trace: which span is below which, and the rows that show them to scale.

import { arrows, h, unseen } from "./dom.js";
import { leftBy, partsSaid } from "./failure.js";
import { count, ms, tick, ticks } from "./format.js";
import { group } from "./parts.js";

const SERVICES = ["pdserve-proxy", "pdserve-prefill", "pdserve-decode", "pdserve-kvd"];
const PREFIX = "pdserve.";
const WHOLE = new Set(["pdserve.request", "pdserve.attempt", "pdserve.decode.stream"]); // what consists of parts

/** Spans in the order of a tree, parents first: {span, depth, orphan}. Spans that name each other as parents come last. */
export function tree(spans) {
  const known = new Map(spans.map((span) => [span.span_id, span]));
  const below = new Map();
  const tops = [];
  for (const span of spans) {
    const parent = span.parent_id && known.has(span.parent_id) && span.parent_id !== span.span_id ? span.parent_id : "";
    if (parent) below.set(parent, [...(below.get(parent) ?? []), span]);
    else tops.push(span);
  }
  const found = [];
  const seen = new Set();
  const early = (a, b) => a.start_us - b.start_us || b.duration_us - a.duration_us;
  function walk(span, depth) {
    if (seen.has(span.span_id)) return;
    seen.add(span.span_id);
    const orphan = depth === 0 && Boolean(span.parent_id) && span.name !== "pdserve.request";
    found.push({ span, depth, orphan });
    for (const child of (below.get(span.span_id) ?? []).sort(early)) walk(child, depth + 1);
  }
  tops.sort(early).forEach((span) => walk(span, 0));
  spans.filter((span) => !seen.has(span.span_id)).forEach((span) => walk(span, 0));
  return found;
}

/** The span `root` and all that is below it. */
export function below(spans, root) {
  const found = new Set([root.span_id]);
  for (const { span } of tree(spans)) if (found.has(span.parent_id)) found.add(span.span_id);
  return spans.filter((span) => found.has(span.span_id));
}

/** The waterfall as an element. `firstUs` is when the client had its first token, or null where it had none. */
export function waterfall(spans, firstUs) {
  const list = tree(spans);
  const start = Math.min(...spans.map((span) => span.start_us));
  const end = Math.max(...spans.map((span) => span.start_us + span.duration_us));
  const whole = Math.max((end - start) / 1e6, 1e-6);
  const ttft = firstUs === null ? 0 : (firstUs - start) / 1e6;
  const toFirst = ttft ? ttft * 1.04 : whole;
  const zooms = ttft && whole > 1.3 * ttft;
  const rows = h("ol", { class: "spans" });
  const axis = h("span", { class: "axis", "aria-hidden": "true" });
  const known = new Map(spans.map((span) => [span.span_id, span]));
  const made = new Map(
    list.map((each) => [
      each.span.span_id,
      row(each, known.get(each.span.parent_id), start, (id) => made.get(id)?.open(true)),
    ]),
  );
  const scale = (full) => {
    const marks = ticks(full, 5);
    axis.replaceChildren(...marks.map((at) => h("span", { style: { left: `${(100 * at) / full}%` }, text: tick(at) })));
    rows.style.setProperty("--grid", `${(100 * marks[1]) / full}%`);
    rows.style.setProperty("--first", ttft ? `${(100 * ttft) / full}%` : "-1%");
    for (const each of made.values()) each.scale(full);
  };
  rows.append(...[...made.values()].map((each) => each.element));
  arrows(rows, () => [...rows.querySelectorAll("button.span")]);
  scale(zooms ? toFirst : whole);

  return h(
    "section",
    { class: "waterfall", "aria-label": "Waterfall" },
    h(
      "div",
      { class: "title" },
      h("h2", { text: "Waterfall" }),
      h(
        "ul",
        { class: "services" },
        SERVICES.filter((name) => spans.some((span) => span.service === name)).map((name) =>
          h(
            "li",
            {},
            h("span", { class: `swatch ${service(name)}`, "aria-hidden": "true" }),
            name.replace("pdserve-", ""),
          ),
        ),
        h("li", {}, h("span", { class: "swatch critical", "aria-hidden": "true" }), "critical path"),
        ttft ? h("li", {}, h("span", { class: "swatch first", "aria-hidden": "true" }), "first token") : null,
      ),
      zooms
        ? zoom(
            () => scale(toFirst),
            () => scale(whole),
          )
        : null,
    ),
    h(
      "div",
      { class: "span-head", "aria-hidden": "true" },
      h("span", { text: "span" }),
      h("span", { text: "service" }),
      axis,
      h("span", { class: "num", text: "ms" }),
    ),
    rows,
  );
}

function zoom(first, all) {
  const radio = (text, act, checked) =>
    h("label", {}, h("input", { type: "radio", name: "zoom", checked, on: { change: act } }), h("span", { text }));
  return h(
    "fieldset",
    { class: "zoom" },
    h("legend", { class: "unseen", text: "Scale" }),
    radio("to first token", first, true),
    radio("whole request", all, false),
  );
}

const service = (name) => (SERVICES.includes(name) ? `s-${name.slice(PREFIX.length)}` : "s-other");

/** Of the part that a span shows, where it stands out; else of its service. */
function colour(span) {
  const part = group(span.name.replace(PREFIX, ""));
  return part === "serialization" || part === "rdma" ? `g-${part}` : service(span.service);
}

/** Why a span failed. Of the part that its attempt failed in: that it is this one, since the attempt says why. */
function causeOf(span, above) {
  const why = span.status_message || span.attributes?.["error.type"] || "error";
  if (!isError(span) || above?.name !== "pdserve.attempt" || above.status_message !== span.status_message) return why;
  const later = partsSaid(span.attributes, "pdserve.failed_in.or_later");
  const never = partsSaid(span.attributes, "pdserve.unstamped");
  return [
    leftBy(span) ? "cancelled here" : "it failed here",
    later.length ? `, or later: ${later.join(", ")} (nobody has stamped that)` : "",
    never.length ? `; not stamped before: ${never.join(", ")}` : "",
  ].join("");
}

function row({ span, depth, orphan }, above, start, focus) {
  const ended = isError(span);
  const failed = ended && !leftBy(span);
  const broken = ended && !WHOLE.has(span.name) ? (failed ? " broken" : " left") : "";
  const bar = h("span", { class: `span-bar ${colour(span)}${span.critical ? " critical" : ""}${broken}` });
  const marks = (span.events ?? []).map((event) => [event, h("span", { class: "event", title: event.name })]);
  const why = causeOf(span, above);
  const id = `span-${span.span_id}`;
  const button = h(
    "button",
    {
      type: "button",
      class: "span",
      "aria-expanded": "false",
      "aria-controls": id,
      "data-span": span.name,
      style: { "--depth": depth },
    },
    h(
      "span",
      { class: "name" },
      unseen(`level ${depth + 1}: `),
      failed ? h("span", { class: "bad", "aria-hidden": "true", text: "✕ " }) : null,
      ended && !failed ? h("span", { "aria-hidden": "true", text: "⊘ " }) : null,
      span.name.startsWith(PREFIX) ? span.name.slice(PREFIX.length) : span.name,
    ),
    h(
      "span",
      { class: "service" },
      h("span", { class: `swatch ${service(span.service)}`, "aria-hidden": "true" }),
      span.service.replace("pdserve-", ""),
    ),
    h(
      "span",
      { class: "lane", "aria-hidden": "true" },
      bar,
      marks.map(([, mark]) => mark),
    ),
    h("span", { class: "num" }, ms(span.duration_us / 1e6), unseen(" milliseconds")),
    span.critical ? unseen(", on the critical path") : null,
    ended ? h("span", { class: failed ? "cause" : "cause calm", text: why }) : null,
    orphan ? h("span", { class: "cause", text: `its parent ${span.parent_id} is not stored` }) : null,
  );
  const inside = h("div", { class: "inside", id, hidden: true });
  const element = h("li", { class: failed ? "failed" : "" }, button, inside);

  function open(value) {
    if (value && !inside.firstChild) inside.append(details(span, start, focus));
    inside.hidden = !value;
    button.setAttribute("aria-expanded", String(value));
    if (value) {
      button.focus({ preventScroll: true });
      element.scrollIntoView({ block: "nearest" });
    }
  }
  button.addEventListener("click", () => open(inside.hidden));
  element.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || inside.hidden) return;
    event.stopPropagation();
    open(false);
    button.focus();
  });

  function scale(full) {
    const at = (us) => (us - start) / 1e6 / full;
    const from = at(span.start_us);
    const to = at(span.start_us + span.duration_us);
    bar.style.setProperty("left", `${100 * Math.min(Math.max(from, 0), 1)}%`);
    bar.style.setProperty("width", `${100 * Math.max(Math.min(to, 1) - Math.max(from, 0), 0)}%`);
    bar.classList.toggle("cut", to > 1.0001);
    bar.classList.toggle("after", from >= 1);
    for (const [event, mark] of marks) {
      const where = at(event.time_us);
      mark.hidden = !(where >= 0 && where <= 1);
      mark.style.setProperty("left", `${100 * where}%`);
    }
  }
  return { element, open, scale };
}

export const isError = (span) => /error/i.test(String(span.status ?? ""));

function details(span, start, focus) {
  const since = (us) => `${ms((us - start) / 1e6)} ms`;
  const facts = [
    ["span", span.name],
    ["service", span.instance ? `${span.service} · ${span.instance}` : span.service],
    ["starts at", since(span.start_us)],
    ["lasts", `${ms(span.duration_us / 1e6)} ms`],
    ["id", span.span_id],
  ];
  if (isError(span)) facts.push(["status", [span.status, span.status_message].filter(Boolean).join(": ")]);
  const attributes = Object.entries(span.attributes ?? {}).sort(([a], [b]) => (a < b ? -1 : 1));
  return h(
    "div",
    { class: "details" },
    pairs("Span", facts),
    attributes.length
      ? pairs(
          "Attributes",
          attributes.map(([key, value]) => [key, written(value)]),
        )
      : h("p", { text: "No attributes." }),
    span.events?.length
      ? pairs(
          "Events",
          span.events.map((event) => [event.name, eventText(event, since)]),
        )
      : null,
    span.links?.length
      ? h(
          "div",
          {},
          h("h3", { text: "Links" }),
          h(
            "ul",
            {},
            span.links.map((link) => linked(link, span, focus)),
          ),
        )
      : null,
  );
}

function pairs(caption, entries) {
  return h(
    "section",
    { "aria-label": caption },
    h("h3", { text: caption }),
    h(
      "dl",
      { class: "pairs" },
      entries.map(([key, value]) => h("div", {}, h("dt", { text: key }), h("dd", { text: value }))),
    ),
  );
}

/** An attribute's value as text. */
export function written(value) {
  if (typeof value === "number") return Number.isInteger(value) ? count(value) : String(Number(value.toFixed(9)));
  return typeof value === "string" ? value : JSON.stringify(value);
}

function eventText(event, since) {
  const more = Object.entries(event.attributes ?? {}).map(([key, value]) => `${key} = ${written(value)}`);
  return [since(event.time_us), ...more].join(" · ");
}

function linked(link, span, focus) {
  const here = !link.trace_id || link.trace_id === span.trace_id || document.getElementById(`span-${link.span_id}`);
  if (here)
    return h(
      "li",
      {},
      h("button", {
        type: "button",
        class: "plain",
        text: `span ${link.span_id}`,
        on: { click: () => focus(link.span_id) },
      }),
    );
  return h(
    "li",
    {},
    h("a", { href: `#/request/${encodeURIComponent(link.trace_id)}`, text: `trace ${link.trace_id}` }),
  );
}
