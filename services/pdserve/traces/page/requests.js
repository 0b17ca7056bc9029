// Owns the view of recent requests: one row each, the time to first token as a bar of its parts to a common scale.

import { get, poll } from "./api.js";
import { arrange, arrows, choice, h, offer, unseen } from "./dom.js";
import { clock, count, day, ms, plural, roundUp, tick } from "./format.js";
import { readout } from "./legend.js";
import { byGroup, swatch } from "./parts.js";
import { OUTCOMES, newRow } from "./row.js";

const EVERY_MS = 2000;
const LIMITS = [50, 200, 1000]; // how many are shown, and what "Show more" goes to
const MODES = [
  ["", "any mode"],
  ["read", "READ"],
  ["write", "WRITE"],
  ["none", "no hand-over"],
];

/** What the view looked like when it was left, so that coming back shows the same at once. */
const left = { answer: null, key: "", row: "", models: new Set(), paused: false, limit: LIMITS[0] };

export function requests(root, { params, signal, failed, replace }) {
  const filter = {
    mode: params.get("mode") ?? "",
    outcome: params.get("outcome") ?? "",
    model: params.get("model") ?? "",
  };
  const rows = new Map();
  const body = h("div", { class: "rows", role: "rowgroup" });
  const axis = h("span", { class: "axis", "aria-hidden": "true" });
  const legend = readout();
  const empty = h("div", { class: "empty", hidden: true });
  const keys = h("p", {
    class: "keys",
    id: "list-keys",
    hidden: true,
    text: "↑ ↓ move · Enter opens · Esc comes back · / opens an id",
  });
  const more = h("p", { class: "more", role: "status", hidden: true });
  const state = h("span", { class: "state", text: "loading" });
  const change = (name) => (value) => {
    filter[name] = value;
    replace(filter);
    loop.now();
  };
  const model = choice("Model", [["", "any model"]], filter.model, change("model"));
  const pause = h("button", { type: "button", class: "pause", "aria-pressed": String(left.paused) });
  const tellPause = () => {
    pause.setAttribute("aria-pressed", String(left.paused));
    pause.textContent = left.paused ? "Resume" : "Pause";
  };
  tellPause();
  pause.addEventListener("click", () => {
    left.paused = !left.paused;
    tellPause();
    loop.pause(left.paused);
    tellState();
  });

  root.append(
    h(
      "div",
      { class: "bar-top" },
      h("h1", { tabindex: "-1", text: "Recent requests" }),
      h(
        "form",
        { class: "choices", "aria-label": "Filters", on: { submit: (event) => event.preventDefault() } },
        choice("Mode", MODES, filter.mode, change("mode")),
        choice(
          "Outcome",
          [["", "any outcome"], ...Object.keys(OUTCOMES).map((each) => [each, each])],
          filter.outcome,
          change("outcome"),
        ),
        model,
        pause,
        state,
      ),
    ),
    legend.element,
    h(
      "div",
      { class: "list", role: "table", "aria-label": "Requests, newest first", "aria-describedby": "list-keys" },
      h(
        "div",
        { role: "rowgroup", class: "head" },
        h(
          "div",
          { role: "row", class: "row" },
          head("time", "time"),
          head("who", "request"),
          head("mode", "mode"),
          head("what", "outcome"),
          head("tok", "tokens", "in → out"),
          head("ser", "proxy ser.", "ms", "serialization"),
          head("rdma", "RDMA wait", "ms", "rdma"),
          head("ttft", "TTFT", "ms"),
          h("span", { role: "columnheader", class: "c-bar" }, unseen("parts of the TTFT"), axis),
        ),
      ),
      body,
    ),
    more,
    empty,
    keys,
  );

  const links = () => [...body.querySelectorAll("a")];
  arrows(body, links);

  function tellState() {
    if (!left.at) return;
    state.textContent = left.paused ? `paused at ${clock(left.at, false)}` : `updated ${clock(left.at, false)}`;
  }

  /** One more is asked for than is shown: then there are more. */
  function tellMore(cut) {
    const next = LIMITS.find((each) => each > left.limit);
    const key = cut ? `${left.limit}` : "";
    more.hidden = !cut;
    if (more.dataset.key === key) return;
    more.dataset.key = key;
    more.replaceChildren(
      `These are the newest ${count(left.limit)}; there are more. `,
      next
        ? h("button", {
            type: "button",
            text: `Show ${count(next)}`,
            on: { click: () => ((left.limit = next), loop.now()) },
          })
        : "Filters, or the id of one above, find others.",
    );
  }

  function draw(answer) {
    const shown = answer.requests.slice(0, left.limit);
    tellMore(answer.requests.length > left.limit);
    const scale = scaleOf(shown);
    const key = JSON.stringify(scale);
    if (axis.dataset.key !== key) {
      axis.dataset.key = key;
      axis.replaceChildren(
        ...[0, 0.5, 1].map((at) => h("span", { style: { left: `${100 * at}%` }, text: tick(scale * at) })),
      );
    }
    for (const request of shown) if (request.model) left.models.add(request.model);
    offer(
      model.querySelector("select"),
      [["", "any model"], ...[...left.models].sort().map((each) => [each, each])],
      filter.model,
    );

    const wanted = shown.map((request) => {
      const row = rows.get(keyOf(request)) ?? newRow(legend, (opened) => (left.row = keyOf(opened)));
      rows.set(keyOf(request), row);
      row.set(request, scale);
      return row.element;
    });
    still(body, wanted, () => arrange(body, wanted));
    legend.rest(shown);
    const alive = new Set(shown.map(keyOf));
    for (const id of [...rows.keys()]) if (!alive.has(id)) rows.delete(id);

    empty.hidden = shown.length > 0;
    keys.hidden = !shown.length;
    if (!shown.length) tellEmpty(empty, Object.values(filter).some(Boolean));
  }

  async function once() {
    const [asked, limit] = [JSON.stringify(filter), left.limit];
    const answer = await get("/api/pdserve/requests", { limit: limit + 1, ...filter }, "requests", signal);
    if (asked !== JSON.stringify(filter) || limit !== left.limit) return; // a filter was changed meanwhile; its own answer comes
    Object.assign(left, { answer, key: asked, at: Date.now() * 1000 });
    draw(answer);
    tellState();
  }

  if (left.answer && left.key === JSON.stringify(filter)) {
    draw(left.answer);
    tellState();
    const back = rows.get(left.row)?.element.querySelector("a");
    back?.focus({ preventScroll: true });
    back?.scrollIntoView({ block: "center" });
  }
  const loop = poll(once, EVERY_MS, signal, failed);
  if (left.paused) loop.pause(true);
}

const head = (column, text, unit, kind) =>
  h(
    "span",
    { role: "columnheader", class: `c-${column}` },
    kind ? swatch(kind) : null,
    text,
    unit ? h("small", { text: ` ${unit}` }) : null,
  );

/** A client's trace may hold several requests. */
const keyOf = (request) => `${request.trace_id}/${request.request_id}/${request.start_us}`;

/** Runs `change` so that what the reader looks at stays where it is, and the focus where it was. */
function still(body, wanted, change) {
  const focused = document.activeElement?.closest?.(".rows > *");
  const keep = new Set(wanted);
  const inView = (row) => row.getBoundingClientRect().bottom > 0;
  const mark = window.scrollY > 0 ? [...body.children].find((row) => keep.has(row) && inView(row)) : undefined;
  const before = mark?.getBoundingClientRect().top;
  const index = focused ? [...body.children].indexOf(focused) : -1;
  change();
  if (mark) window.scrollBy({ top: mark.getBoundingClientRect().top - before, behavior: "instant" });
  if (index >= 0 && !keep.has(focused)) {
    body.children[Math.min(index, body.children.length - 1)]?.querySelector("a")?.focus({ preventScroll: true });
  }
}

/** The bar's full length in seconds: the longest, unless a few stragglers would flatten all others. */
export function scaleOf(shown) {
  const sorted = shown
    .map(lengthOf)
    .filter((seconds) => seconds > 0)
    .sort((a, b) => a - b);
  if (!sorted.length) return 0.1;
  const longest = sorted[sorted.length - 1];
  const most = sorted[Math.floor(0.9 * (sorted.length - 1))];
  return roundUp(longest > 4 * most ? 1.5 * most : longest);
}

const lengthOf = (request) => request.ttft ?? Object.values(byGroup(request)).reduce((sum, each) => sum + each, 0);

function tellEmpty(empty, filtered) {
  const key = String(filtered);
  if (empty.dataset.key === key) return;
  empty.dataset.key = key;
  empty.replaceChildren(
    ...(filtered
      ? [
          h("h2", { text: "No request matches these filters" }),
          h("p", {}, h("a", { href: "#/", text: "Show all requests" })),
        ]
      : [
          h("h2", { text: "No requests yet" }),
          h("p", { text: "Send one to a running deployment; it is here a second after its end:" }),
          h("pre", { text: 'pdserve generate "The capital of France is"' }),
          h(
            "p",
            {},
            "No deployment yet? ",
            h("code", { text: "pdserve up" }),
            " starts one that sends its traces here.",
          ),
        ]),
  );
}
