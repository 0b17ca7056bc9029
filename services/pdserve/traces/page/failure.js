// Owns how a request, or an attempt, that failed before its first token says where it was.

import { h } from "./dom.js";
import { ms } from "./format.js";
import { stack, title } from "./parts.js";

/** How it ended, in a word. */
export const ending = (request) => (request.outcome === "cancelled" ? "was cancelled" : "failed");

/** A span's attribute that is a list, by the parts' names as people use them. */
export const partsSaid = (attributes, key) => [attributes?.[key] ?? []].flat().map(title);

/** In place of the figures of a TTFT: when it failed, in which part, and what of that is not sure. */
export function failure(request, attributes) {
  const names = partsSaid(attributes, "pdserve.failed_in.or_later");
  const figure = (kind, name, ...value) => h("div", { class: `figure f-${kind}` }, h("dt", { text: name }), h("dd", {}, value));
  return h(
    "dl",
    { class: "figures" },
    figure("all", "time to first token", h("b", { text: "–" })),
    figure("failed", `${ending(request)} after`, h("b", { text: ms(request.failed_after) }), h("span", { text: " ms" })),
    figure(
      "failed",
      `${ending(request)} in`,
      h("b", { text: title(request.failed_in) }),
      names.length ? h("small", { text: `or later, which nobody has stamped: ${names.join(", ")}` }) : null,
    ),
  );
}

/** Where a failed attempt was, as a bar of its parts; nothing where it gave a first token, or has not said. */
export function brokenAt(attempt, spans) {
  const failed_in = attempt.attributes?.["pdserve.failed_in"];
  if (!failed_in) return null;
  const own = spans.filter((span) => span.parent_id === attempt.span_id && span.name.startsWith("pdserve."));
  const parts = Object.fromEntries(own.map((span) => [span.name.slice("pdserve.".length), span.duration_us / 1e6]));
  return h(
    "span",
    { class: "broken-at" },
    h("span", { text: `in ${title(failed_in)}` }),
    stack({ parts, failed_in }, attempt.duration_us / 1e6),
  );
}
