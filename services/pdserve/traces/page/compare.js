// Owns the view that puts READ beside WRITE: the median of each part, and how TTFT is spread.

import { get, poll } from "./api.js";
import { choice, h } from "./dom.js";
import { count, ms, plural, roundUp, signed } from "./format.js";
import { group, ordered, swatch, title } from "./parts.js";

const EVERY_MS = 10_000;
export const WINDOWS = [
  ["900", "last 15 minutes"],
  ["3600", "last hour"],
  ["21600", "last 6 hours"],
  ["86400", "last 24 hours"],
  ["604800", "last 7 days"],
];
const QUANTILES = [
  ["p50", "P50"],
  ["p90", "P90"],
  ["p99", "P99"],
];

export function compare(root, { params, signal, failed, replace }) {
  let wide = params.get("window") ?? "3600";
  const body = h("div", { class: "compare" });
  root.append(
    h(
      "div",
      { class: "bar-top" },
      h("h1", { tabindex: "-1", text: "READ beside WRITE" }),
      h(
        "form",
        { class: "choices", "aria-label": "Window", on: { submit: (event) => event.preventDefault() } },
        choice("Window", WINDOWS, wide, (value) => {
          wide = value;
          replace({ window: wide });
          loop.now();
        }),
      ),
    ),
    body,
  );
  async function once() {
    const asked = wide;
    // One bucket as wide as the window: only the totals are looked at.
    const of = (mode) => get("/api/pdserve/parts", { window: asked, bucket: asked, mode }, "total", signal);
    const [read, write] = await Promise.all([of("read"), of("write")]);
    if (asked !== wide) return;
    const key = JSON.stringify([read, write]);
    if (body.dataset.key === key) return;
    body.dataset.key = key;
    body.replaceChildren(...drawn(read, write));
  }
  const loop = poll(once, EVERY_MS, signal, failed);
}

function drawn(read, write) {
  const sides = [
    ["READ", read.total],
    ["WRITE", write.total],
  ];
  if (sides.every(([, total]) => !total?.count))
    return [none("No request was handed over in this window", ["read", "write"])];
  const missing = sides.filter(([, total]) => !total?.count).map(([name]) => name);
  return [
    spread(sides),
    missing.length ? none(`No ${missing[0]} request in this window`, [missing[0].toLowerCase()]) : null,
    medians(sides, ordered(new Set([...read.parts, ...write.parts, "unattributed"]))),
    h("p", {
      class: "note",
      text: "A median is each part's own: medians of parts need not add up to the median of TTFT.",
    }),
  ].filter(Boolean);
}

function none(text, modes) {
  return h(
    "div",
    { class: "empty" },
    h("h2", { text }),
    h("p", { text: modes.length > 1 ? "Send the same prompt both ways:" : "Send one:" }),
    h("pre", { text: modes.map((mode) => `pdserve generate --mode ${mode} "The capital of France is"`).join("\n") }),
  );
}

function spread(sides) {
  const at = (total, quantile) => total?.[quantile]?.ttft;
  return h(
    "table",
    { class: "numbers spread" },
    h("caption", { text: "Time to first token, ms" }),
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        h("td"),
        ...QUANTILES.map(([, text]) => h("th", { scope: "col", class: "num", text })),
        h("th", { scope: "col", class: "num", text: "requests" }),
      ),
    ),
    h(
      "tbody",
      {},
      sides.map(([name, total]) =>
        h(
          "tr",
          {},
          h("th", { scope: "row", text: name }),
          ...QUANTILES.map(([key]) => h("td", { class: "num", text: ms(at(total, key), 2) })),
          h("td", { class: "num", text: count(total?.count ?? 0) }),
        ),
      ),
      h(
        "tr",
        { class: "total" },
        h("th", { scope: "row", text: "WRITE − READ" }),
        ...QUANTILES.map(([key]) =>
          h("td", { class: "num", text: difference(at(sides[0][1], key), at(sides[1][1], key)) }),
        ),
        h("td"),
      ),
    ),
  );
}

const known = (seconds) => seconds !== undefined && seconds !== null;
const difference = (a, b) => (known(a) && known(b) ? signed(b - a, 2) : "–");

function medians(sides, names) {
  const p50 = (total, name) => total?.p50?.[name];
  const longest = Math.max(...names.flatMap((name) => sides.map(([, total]) => p50(total, name) ?? 0)));
  const full = roundUp(longest);
  const bar = (name, seconds) =>
    h(
      "div",
      { class: "half", "aria-hidden": "true" },
      h("span", { class: `seg g-${group(name)}`, style: { width: `${(100 * (seconds ?? 0)) / full}%` } }),
    );
  // Roles are said because narrow windows lay the cells out as blocks, which would take their meaning away.
  return h(
    "table",
    { class: "numbers medians", role: "table" },
    h("caption", { text: `P50 of each part, ms; bars to one scale, full is ${ms(full, 0)} ms` }),
    h(
      "thead",
      { role: "rowgroup" },
      h(
        "tr",
        { role: "row" },
        h("th", { role: "columnheader", scope: "col", text: "part" }),
        ...sides.map(([name, total]) =>
          h(
            "th",
            { role: "columnheader", scope: "col", class: "side-head" },
            name,
            h("small", { text: ` ${plural(total?.count ?? 0, "request")}` }),
          ),
        ),
        h("th", { role: "columnheader", scope: "col", class: "num", text: "WRITE − READ" }),
      ),
    ),
    h(
      "tbody",
      { role: "rowgroup" },
      names.map((name) =>
        h(
          "tr",
          { role: "row", class: `p-${group(name)}` },
          h("th", { role: "rowheader", scope: "row" }, swatch(group(name)), title(name)),
          ...sides.map(([side, total]) =>
            h(
              "td",
              { role: "cell", class: "both", "data-side": side },
              h("span", { class: "num", text: ms(p50(total, name), 2) }),
              bar(name, p50(total, name)),
            ),
          ),
          h("td", { role: "cell", class: "num diff", text: difference(...sides.map(([, total]) => p50(total, name))) }),
        ),
      ),
    ),
  );
}
