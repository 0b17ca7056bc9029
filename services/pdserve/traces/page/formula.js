// Owns the two sums that explain a time to first token, READ's and WRITE's, from raw intervals that may overlap.

import { h } from "./dom.js";
import { ms, signed } from "./format.js";

const RAW = "pdserve.raw.";
const TTFT = "pdserve.ttft.";
/** Term: words, and the attributes that hold it, best first. */
const TAIL = [
  ["first token", [`${RAW}first_token`, `${RAW}decode.first_step`]],
  ["detokenize", [`${RAW}detokenize`]],
  ["encode", [`${RAW}encode`, `${TTFT}encode`]],
  ["network", [`${RAW}network`]],
];
const QUEUE_P = ["queue(P)", [`${RAW}prefill.queue`]];
const FORWARD_P = ["forward(P)", [`${RAW}prefill.forward`]];
const ADMIT_D = `${RAW}decode.admit`; // decode's wait for blocks is part of its queue
const QUEUE_D = ["queue(D)", [`${RAW}decode.queue`]];

const READ = [
  QUEUE_P,
  FORWARD_P,
  ["proxy serialization", [`${RAW}proxy.serialization`, `${TTFT}proxy_serialization`], "serialization"],
  ["RDMA wait", [`${RAW}kv.wait`, `${TTFT}rdma_wait`], "rdma"],
  QUEUE_D,
  ...TAIL,
];
const WRITE_P = [QUEUE_P, FORWARD_P, ["write", [`${RAW}write`], "rdma"]];

/** The section, or null for a request without hand-over. */
export function formulaOf(request, attributes) {
  const { mode } = request;
  if (mode !== "read" && mode !== "write") return null;
  const value = (term) => {
    const found = term[1].map((key) => attributes[key]).find((each) => typeof each === "number");
    return term === QUEUE_D && found !== undefined ? found + (attributes[ADMIT_D] ?? 0) : found;
  };
  const line = (term, sign = "+", kind = "") =>
    h(
      "tr",
      { class: [kind, term[2] ? `p-${term[2]}` : ""].join(" ") },
      h("th", { scope: "row" }, h("span", { class: "sign", text: sign }), term[0]),
      h("td", { class: "num", text: ms(value(term)) }),
    );
  const sum = attributes[`pdserve.formula.${mode}`];
  if (sum === undefined) return null; // it ended before there was anything to add up
  let lines;
  if (mode === "read") lines = READ.map((term, index) => line(term, index ? "+" : ""));
  else {
    const pushed = WRITE_P.map(value);
    const p = pushed.every((each) => each !== undefined) ? pushed.reduce((all, each) => all + each, 0) : undefined;
    const d = value(QUEUE_D);
    const larger = p !== undefined && d !== undefined ? Math.max(p, d) : undefined;
    const row = (name, seconds, sign, kind = "") =>
      h(
        "tr",
        { class: kind },
        h("th", { scope: "row" }, h("span", { class: "sign", text: sign }), name),
        h("td", { class: "num", text: ms(seconds) }),
      );
    lines = [
      row("the larger of P and D", larger, ""),
      ...WRITE_P.map((term, index) => line(term, index ? "+" : "P", "inner")),
      line(QUEUE_D, "D", "inner"),
      ...TAIL.map((term) => line(term)),
    ];
  }
  return h(
    "section",
    { class: "formula", "aria-label": "Formula" },
    h("h2", { text: `${mode.toUpperCase()}'s formula` }),
    h("p", { class: "note", text: "From raw intervals, which may overlap; the parts above never do." }),
    h(
      "table",
      { class: "numbers" },
      h(
        "thead",
        { class: "unseen" },
        h("tr", {}, h("th", { scope: "col", text: "term" }), h("th", { scope: "col", text: "ms" })),
      ),
      h("tbody", {}, lines),
      h(
        "tfoot",
        {},
        h(
          "tr",
          { class: "total" },
          h("th", { scope: "row" }, h("span", { class: "sign", text: "=" }), "formula"),
          h("td", { class: "num", text: ms(sum) }),
        ),
        h(
          "tr",
          {},
          h("th", { scope: "row" }, h("span", { class: "sign" }), "TTFT beyond it"),
          h("td", { class: "num", text: sum === undefined || request.ttft == null ? "–" : signed(request.ttft - sum) }),
        ),
      ),
    ),
  );
}
