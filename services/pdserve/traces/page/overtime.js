// Owns the view of one part, or of TTFT, over time: its P50, P90 and P99 by bucket.

import { get, poll } from "./api.js";
import { chart } from "./chart.js";
import { WINDOWS } from "./compare.js";
import { choice, h, offer } from "./dom.js";
import { clock, count, day, ms, plural } from "./format.js";
import { ordered, title } from "./parts.js";

const EVERY_MS = 10_000;
const BUCKETS = 60;
const QUANTILES = ["p50", "p90", "p99"];
const MODES = [
  ["", "any mode"],
  ["read", "READ"],
  ["write", "WRITE"],
  ["none", "no hand-over"],
];

export function overTime(root, { params, signal, failed, replace }) {
  const chosen = {
    series: params.get("series") ?? "ttft",
    mode: params.get("mode") ?? "",
    window: params.get("window") ?? "3600",
  };
  let names = [];
  let last = null;
  const change = (name) => (value) => {
    chosen[name] = value;
    replace(chosen);
    if (name === "series" && last) draw();
    else loop.now();
  };
  const series = choice("Show", [["ttft", "TTFT"]], chosen.series, change("series"));
  const plot = chart({ label: () => name(chosen.series), value: (seconds) => ms(seconds, 2), signal });
  const body = h("tbody");
  const rows = h("table", { class: "numbers" }, tableHead(), body);
  const table = h("details", { class: "as-table" }, h("summary", { text: "As a table" }), rows);
  const sum = h("dl", { class: "figures" });
  const empty = h(
    "div",
    { class: "empty", hidden: true },
    h("h2", { text: "No request in this window" }),
    h("p", { text: "Choose a longer one, or send some:" }),
    h("pre", { text: 'pdserve generate "The capital of France is"' }),
  );
  const shown = h("div", { class: "over", hidden: true }, sum, plot.element, table);
  root.append(
    h(
      "div",
      { class: "bar-top" },
      h("h1", { tabindex: "-1", text: "Over time" }),
      h(
        "form",
        { class: "choices", "aria-label": "What is shown", on: { submit: (event) => event.preventDefault() } },
        series,
        choice("Mode", MODES, chosen.mode, change("mode")),
        choice("Window", WINDOWS, chosen.window, change("window")),
      ),
    ),
    shown,
    empty,
  );

  function draw() {
    const total = last.total?.count ?? 0;
    shown.hidden = total === 0;
    empty.hidden = total > 0;
    names = ordered(new Set([...last.parts, "unattributed"]));
    offer(
      series.querySelector("select"),
      [["ttft", "TTFT"], ...names.map((each) => [each, title(each)])],
      chosen.series,
    );
    if (!total) return;
    const at = (bucket, quantile) => bucket[quantile]?.[chosen.series];
    sum.replaceChildren(
      ...QUANTILES.map((quantile) =>
        h(
          "div",
          { class: "figure" },
          h("dt", { text: `${quantile.toUpperCase()} of ${name(chosen.series)}` }),
          h("dd", {}, h("b", { text: ms(at(last.total, quantile), 2) }), h("span", { text: " ms" })),
        ),
      ),
      h("div", { class: "figure" }, h("dt", { text: "requests" }), h("dd", {}, h("b", { text: count(total) }))),
    );
    const points = last.buckets.map((bucket) => ({
      at: bucket.start_us,
      count: bucket.count,
      values: QUANTILES.map((quantile) => (bucket.count ? at(bucket, quantile) : undefined)),
    }));
    const seconds = bucketOf(chosen.window);
    plot.set(points, { wide: Number(chosen.window), bucket: seconds });
    body.replaceChildren(
      ...points
        .filter((point) => point.count)
        .reverse()
        .map((point) =>
          h(
            "tr",
            {},
            h("th", { scope: "row", text: `${day(point.at)} ${clock(point.at, false)}` }),
            ...point.values.map((each) => h("td", { class: "num", text: ms(each, 2) })),
            h("td", { class: "num", text: count(point.count) }),
          ),
        ),
    );
    table.querySelector("summary").textContent = `As a table, ${plural(seconds, "second")} a row`;
  }

  async function once() {
    const asked = JSON.stringify(chosen);
    const { mode, window } = chosen;
    const answer = await get("/api/pdserve/parts", { window, bucket: bucketOf(window), mode }, "buckets", signal);
    if (asked !== JSON.stringify(chosen) && (mode !== chosen.mode || window !== chosen.window)) return;
    last = answer;
    draw();
  }
  const loop = poll(once, EVERY_MS, signal, failed);
}

const name = (series) => (series === "ttft" ? "TTFT" : title(series));
const bucketOf = (window) => Math.max(1, Math.round(Number(window) / BUCKETS));

function tableHead() {
  return h(
    "thead",
    {},
    h(
      "tr",
      {},
      h("th", { scope: "col", text: "from" }),
      ...["P50", "P90", "P99"].map((text) => h("th", { scope: "col", class: "num", text: `${text}, ms` })),
      h("th", { scope: "col", class: "num", text: "requests" }),
    ),
  );
}
