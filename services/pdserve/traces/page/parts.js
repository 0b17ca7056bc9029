// Owns what the parts of the time to first token are called, in which order they come, and their colours. Pure,
// but for `stack`, which draws them.

import { h } from "./dom.js";
import { apportion, microseconds, ms } from "./format.js";

/** In the order in which a request passes them: part, group. */
const ORDER = [
  ["tokenize", "proxy"],
  ["admit", "proxy"],
  ["route", "proxy"],
  ["retry", "proxy"],
  ["prefill.hop", "prefill"],
  ["prefill.queue", "prefill"],
  ["prefill.forward", "prefill"],
  ["proxy.serialization", "serialization"],
  ["decode.hop", "decode"],
  ["decode.admit", "decode"],
  ["kv.wait", "rdma"],
  ["decode.queue", "decode"],
  ["decode.first_step", "decode"],
  ["detokenize", "answer"],
  ["encode", "answer"],
  ["egress", "answer"],
  ["unattributed", "unattributed"],
];
const PLACE = new Map(ORDER.map(([name, group], index) => [name, { group, index }]));

/** What the legend shows; two of them are what a split costs, and stand out. */
export const GROUPS = [
  ["proxy", "proxy, before"],
  ["prefill", "prefill"],
  ["serialization", "proxy serialization"],
  ["rdma", "RDMA wait"],
  ["decode", "decode"],
  ["answer", "answer"],
  ["unattributed", "unattributed"],
];

export const group = (part) => PLACE.get(part)?.group ?? "other";

/** Parts of this page's making have a place; those of a newer server come before the answer. */
const place = (part) => PLACE.get(part)?.index ?? PLACE.get("detokenize").index - 0.5;

export const ordered = (names) => [...names].sort((a, b) => place(a) - place(b) || (a < b ? -1 : 1));

/** Names people use for the two that stand out. */
export function title(part) {
  return { "proxy.serialization": "proxy serialization", "kv.wait": "RDMA wait (kv.wait)" }[part] ?? part;
}

/** The parts of a request in order, what no stamp explains last, but for the part in which it failed: [name, seconds]. */
export function partsOf(request) {
  const named = ordered(Object.keys(request.parts ?? {})).map((name) => [name, request.parts[name]]);
  const rest = request.unattributed ? [["unattributed", request.unattributed]] : [];
  const broken = ([name]) => name === request.failed_in;
  return [...named.filter((part) => !broken(part)), ...rest, ...named.filter(broken)];
}

/** Seconds of each part and of what is unattributed, as its table writes them: whole microseconds that add up. */
export function exactParts(request) {
  const given = { ...request.parts, unattributed: request.unattributed ?? 0 };
  const whole = hasFailed(request) ? request.failed_after : request.ttft;
  const shares = typeof whole === "number" ? apportion(Object.values(given), whole) : null;
  return Object.fromEntries(
    Object.entries(given).map(([name, seconds], index) => [name, (shares ? shares[index] : microseconds(seconds)) / 1e6]),
  );
}

/** Where a request ended; "or later", where nobody has seen the end of that part. */
export const placeOf = (request) => title(request.failed_in) + (request.failed_or_later?.length ? " or later" : "");

/** Whether its client left: it ended then, and nothing failed. */
export const wasCancelled = (request) => request.outcome === "cancelled";

/** Whether it ended before its first token, and says where: its parts are no parts of a TTFT then. */
export const hasFailed = (request) => Boolean(request.failed_in) && typeof request.failed_after === "number";

/** Seconds of each group. */
export function byGroup(request) {
  const sums = {};
  for (const [name, seconds] of partsOf(request)) sums[group(name)] = (sums[group(name)] ?? 0) + seconds;
  return sums;
}

/** A bar of the parts, `full` seconds wide; longer ones are cut off and say so. */
export function stack(request, full, { labels = false } = {}) {
  const parts = partsOf(request).filter(([, seconds]) => seconds > 0);
  const calm = wasCancelled(request);
  const exact = typeof request.ttft === "number" || hasFailed(request) ? exactParts(request) : {};
  const there = `, where it ${calm ? "was cancelled" : "failed"}${request.failed_or_later?.length ? ", or later" : ""}`;
  const words = (name, seconds) =>
    `${title(name)} ${ms(exact[name] ?? seconds)} ms${name === request.failed_in ? there : ""}`;
  const said = parts.map(([name, seconds]) => words(name, seconds)).join(", ");
  const bar = h("div", { class: "stack", role: "img", "aria-label": said || "no parts" });
  let left = 0;
  for (const [name, seconds] of parts) {
    const width = Math.min(seconds, full - left);
    left += seconds;
    if (left > full * 1.000001) bar.classList.add("cut");
    if (width <= 0) break;
    const share = (100 * width) / full;
    bar.append(
      h(
        "span",
        {
          class: `seg g-${group(name)}${share < 1 ? " thin" : ""}${name === request.failed_in ? (calm ? " left" : " broken") : ""}`,
          "data-part": name,
          title: words(name, seconds),
          style: { width: `${share}%` },
        },
        labels ? label(name) : [],
      ),
    );
  }
  if (request.failed_in)
    bar.append(h("span", { class: calm ? "end calm" : "end", "aria-hidden": "true", text: calm ? "⊘" : "✕" }));
  return bar;
}

/** A part's name inside its bar, in as many words as there is room for. */
function label(name) {
  const whole = name === "kv.wait" ? "RDMA wait" : title(name);
  const short = { "proxy.serialization": "proxy ser." }[name];
  const room = (text) => `in fits-${Math.min(20, Math.max(6, 2 * Math.ceil(text.length / 2)))}`;
  return [
    h("span", { class: room(whole), text: whole }),
    short ? h("span", { class: `${room(short)} short`, text: short }) : null,
  ];
}

/** Each group's share of all the time to first token of `requests`; those that had none do not count. */
export function shares(requests) {
  const sums = {};
  let all = 0;
  for (const request of requests) {
    if (hasFailed(request)) continue;
    for (const [name, seconds] of Object.entries(byGroup(request))) {
      sums[name] = (sums[name] ?? 0) + seconds;
      all += seconds;
    }
  }
  return Object.fromEntries(Object.entries(sums).map(([name, seconds]) => [name, all ? seconds / all : 0]));
}

/** The small square before a part's name. */
export const swatch = (groupName) => h("span", { class: `swatch g-${groupName}`, "aria-hidden": "true" });
