// Owns the view of one request: its facts, its parts and their sum, the formula of its mode, its attempts, its spans.

import { ApiError, get } from "./api.js";
import { h } from "./dom.js";
import { bytes, clock, count, day, microseconds, ms, percent, plural } from "./format.js";
import { brokenAt, ending, failure, leftBy } from "./failure.js";
import { formulaOf } from "./formula.js";
import { exactParts, group, hasFailed, partsOf, placeOf, stack, swatch, title, wasCancelled } from "./parts.js";
import { modeName, outcomeMark, tries } from "./row.js";
import { below, isError, waterfall } from "./waterfall.js";

export function oneRequest(root, { rest, signal, failed, from }) {
  const [id = "", called = ""] = rest;
  // Back to the list as it was left, with its filters.
  const back = () => (from === "requests" ? history.back() : (location.hash = "#/"));
  document.addEventListener(
    "keydown",
    (event) => {
      if (event.key === "Escape" && !event.defaultPrevented && !event.target.closest?.("select, input")) back();
    },
    { signal },
  );
  const heading = h("h1", { tabindex: "-1", class: "id", text: called || id });
  const named = h("code", {});
  const trace = h("span", { class: "trace", hidden: true }, "trace ", named);
  const json = h("a", { class: "json", hidden: true, text: "JSON for Jaeger" });
  const body = h("div", { class: "one" });
  root.append(
    h(
      "div",
      { class: "bar-top" },
      h("a", {
        class: "back",
        href: "#/",
        text: "← Requests",
        on: { click: (event) => (event.preventDefault(), back()) },
      }),
      heading,
      trace,
      json,
    ),
    body,
  );
  load();

  async function load() {
    try {
      const answer = await get(`/api/pdserve/trace/${encodeURIComponent(id)}`, {}, "spans", signal);
      if (called && answer.request?.request_id !== called) answer.request = await other();
      failed(null);
      named.textContent = answer.trace_id;
      json.href = `/api/traces/${encodeURIComponent(answer.trace_id)}`;
      trace.hidden = json.hidden = false;
      const name = answer.request?.request_id || answer.trace_id || id;
      heading.textContent = name;
      document.title = `${name} · pdserve traces`;
      body.replaceChildren(...whole(answer));
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && error.status === 404) {
        failed(null);
        body.replaceChildren(absent());
      } else failed(error);
    }
  }

  /** A trace of the client's own may hold several requests: the API gives the first, this is the one asked for. */
  async function other() {
    const answer = await get("/api/pdserve/requests", { id: called }, "requests", signal);
    return answer.requests.find((request) => request.trace_id === id) ?? null;
  }

  function absent() {
    return h(
      "div",
      { class: "empty" },
      h("h2", { text: "No such trace here" }),
      h("p", {
        text: "It may still run, may not have been sampled, or may have been dropped because the store keeps only so much. A trace is here about a second after its request's end.",
      }),
      h("p", {}, h("button", { type: "button", text: "Look again", on: { click: load } })),
    );
  }
}

function whole(answer) {
  const { request } = answer;
  const roots = answer.spans.filter((span) => span.name === "pdserve.request");
  const root = roots.find((span) => span.attributes?.["pdserve.request_id"] === request?.request_id) ?? roots[0];
  const spans = roots.length > 1 && request ? below(answer.spans, root) : answer.spans;
  const firstUs = request && root && typeof request.ttft === "number" ? root.start_us + request.ttft * 1e6 : null;
  const attributes = root?.attributes ?? {};
  if (!request) {
    return [
      h("p", { class: "note", text: "The request's own span is not stored yet: these are the spans that are." }),
      spans.length ? waterfall(spans, null) : null,
    ].filter(Boolean);
  }
  return [
    facts(request, attributes),
    h(
      "section",
      { class: "to-first", "aria-label": hasFailed(request) ? `Time until it ${ending(request)}` : "Time to first token" },
      hasFailed(request) ? failure(request, attributes) : figures(request),
      stack(request, total(request), { labels: true }),
    ),
    h(
      "div",
      { class: "columns" },
      h("div", { class: "side" }, partsTable(request), formulaOf(request, attributes)),
      h(
        "div",
        { class: "wide" },
        attemptsOf(spans),
        spans.length ? waterfall(spans, firstUs) : h("p", { class: "note", text: "No spans." }),
      ),
    ),
  ];
}

const total = (request) =>
  request.ttft ??
  request.failed_after ??
  Math.max(
    partsOf(request).reduce((sum, [, seconds]) => sum + seconds, 0),
    1e-6,
  );

function facts(request, attributes) {
  const blocks = attributes["pdserve.kv.blocks"];
  const moved = request.kv_bytes
    ? `${bytes(request.kv_bytes)}${blocks ? ` in ${plural(blocks, "block")}` : ""}`
    : "none";
  const entries = [
    [
      "outcome",
      h(
        "span",
        {},
        outcomeMark(request.outcome),
        tries(request).map((text) => h("span", { class: "tag", text })),
      ),
    ],
    ["mode", modeName(request.mode) + (request.transport ? ` over ${request.transport}` : "")],
    ["model", request.model || "–"],
    ["tokens", `${count(request.input_tokens)} in → ${count(request.output_tokens)} out`],
    ["KV moved", moved],
    ["whole request", `${ms(request.e2e)} ms`],
    ["started", `${day(request.start_us)} ${clock(request.start_us)}`],
  ];
  if (request.outcome !== "finished" && typeof request.ttft === "number")
    entries.splice(1, 0, ["ended", `in decode.stream, after ${ms(request.e2e)} ms`]);
  if (request.outcome !== "finished" && request.reason) {
    const said = attributes["pdserve.error"];
    entries.splice(1, 0, [
      "reason",
      h("span", { class: wasCancelled(request) ? "why calm" : "why", text: said ? `${request.reason}: ${said}` : request.reason }),
    ]);
  }
  return h(
    "dl",
    { class: "facts" },
    entries.map(([key, value]) => h("div", {}, h("dt", { text: key }), h("dd", {}, value))),
  );
}

function figures(request) {
  const exact = exactParts(request);
  const shown = [
    ["time to first token", request.ttft, "all"],
    ["proxy serialization", exact["proxy.serialization"], "serialization"],
    ["RDMA wait", exact["kv.wait"], "rdma"],
    ["unattributed", request.unattributed === null ? null : exact.unattributed, "unattributed"],
  ];
  return h(
    "dl",
    { class: "figures" },
    shown.map(([name, seconds, kind]) =>
      h(
        "div",
        { class: `figure f-${kind}` },
        h("dt", {}, kind === "all" ? null : swatch(kind), name),
        h(
          "dd",
          {},
          h("b", { text: ms(seconds) }),
          seconds === null || seconds === undefined ? null : h("span", { text: " ms" }),
          kind === "all" || !request.ttft ? null : h("small", { text: percent(seconds, request.ttft) }),
        ),
      ),
    ),
  );
}

/** Each part, their sum, what is left, and the time to first token that it all adds up to. */
function partsTable(request) {
  const parts = partsOf({ ...request, unattributed: 0 });
  const rest = request.unattributed ?? 0; // null where there was no first token
  const failed = hasFailed(request);
  const whole = failed ? request.failed_after : request.ttft;
  const exact = exactParts(request);
  const sum = parts.reduce((all, [, each]) => all + each, 0);
  const exactSum = parts.reduce((all, [name]) => all + exact[name], 0);
  const off =
    whole !== null && whole !== undefined && microseconds(exactSum + exact.unattributed) !== microseconds(whole);
  const line = (name, value, share, kind = "", swatched = null) =>
    h(
      "tr",
      { class: kind },
      h("th", { scope: "row" }, swatched, name),
      h("td", { class: "num", text: value }),
      h("td", { class: "num", text: share }),
    );
  const rows = parts.map(([name, seconds]) =>
    name === request.failed_in
      ? line(
          `${wasCancelled(request) ? "⊘" : "✕"} ${placeOf(request)}, until it ${ending(request)}`,
          ms(exact[name]),
          percent(seconds, whole),
          wasCancelled(request) ? "p-left" : "p-broken",
          swatch(group(name)),
        )
      : line(title(name), ms(exact[name]), percent(seconds, whole), `p-${group(name)}`, swatch(group(name))),
  );
  return h(
    "section",
    { class: "parts", "aria-label": "Parts" },
    h("h2", { text: failed ? `Parts until it ${ending(request)}` : "Parts of the time to first token" }),
    h(
      "table",
      { class: "numbers" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", { scope: "col", text: "part" }),
          h("th", { scope: "col", class: "num", text: "ms" }),
          h("th", { scope: "col", class: "num", text: failed ? "of all" : "of TTFT" }),
        ),
      ),
      h("tbody", {}, rows.length ? rows : h("tr", {}, h("td", { colspan: "3", text: "None was stamped." }))),
      h(
        "tfoot",
        {},
        line("sum of parts", ms(exactSum), percent(sum, whole)),
        line(
          "unattributed",
          request.unattributed === null ? ms(null) : ms(exact.unattributed),
          percent(request.unattributed, whole),
          "",
          swatch("unattributed"),
        ),
        line(failed ? `${ending(request)} after` : "TTFT", ms(whole), whole ? "100.0 %" : "–", "total"),
      ),
    ),
    failed || whole === null || whole === undefined
      ? h("p", {
          class: "note",
          text: failed
            ? "It ended before its first token: there is no TTFT, and it counts in no percentile."
            : "It ended before its first token: there is no TTFT that the parts could add up to.",
        })
      : null,
    off
      ? h("p", {
          class: "note bad",
          text: `The parts and what is unattributed differ from ${failed ? "the time until then" : "TTFT"} by ${ms(sum + rest - whole)} ms.`,
        })
      : null,
  );
}

/** Attempts side by side, where there was more than one or one that failed. */
function attemptsOf(spans) {
  const tried = spans.filter((span) => span.name === "pdserve.attempt").sort((a, b) => a.start_us - b.start_us);
  if (tried.length < 2 && !tried.some(isError)) return null;
  return h(
    "section",
    { class: "attempts", "aria-label": "Attempts" },
    h("h2", { text: "Attempts" }),
    h(
      "ol",
      {},
      tried.map((span) => {
        const engines = ["pdserve.prefill.engine_id", "pdserve.decode.engine_id"]
          .map((key) => span.attributes?.[key])
          .filter(Boolean);
        return h(
          "li",
          {},
          h("span", {
            class: `outcome o-${leftBy(span) ? "cancelled" : isError(span) ? "failed" : "finished"}`,
            text: leftBy(span) ? "⊘ cancelled" : isError(span) ? "✕ failed" : "✓ answered",
          }),
          h("span", { class: "num", text: `${ms(span.duration_us / 1e6)} ms` }),
          brokenAt(span, spans),
          engines.length ? h("code", { text: engines.map((each) => String(each).slice(0, 8)).join(" → ") }) : null,
          isError(span)
            ? h("span", {
                class: leftBy(span) ? "why calm" : "why",
                text: span.status_message || span.attributes?.["error.type"] || "no cause was given",
              })
            : null,
        );
      }),
    ),
  );
}
