// Owns how a request, or an attempt, that ended before its first token says where it was.

import { h } from "./dom.js";
import { ms } from "./format.js";
import { placeOf, stack, title, wasCancelled } from "./parts.js";

/** How it ended, in a word. */
export const ending = (request) => (wasCancelled(request) ? "was cancelled" : "failed");

/** A span's attribute that is a list, by the parts' names as people use them. */
export const partsSaid = (attributes, key) => [attributes?.[key] ?? []].flat().map(title);

/** Whether a span ended because its client left. */
export const leftBy = (span) => /^CANCELLED(:|$)/.test(span.status_message ?? "");

/** In place of the figures of a TTFT: when it failed, in which part, and what of that is not sure. */
export function failure(request, attributes) {
  const names = partsSaid(attributes, "pdserve.failed_in.or_later");
  const kind = wasCancelled(request) ? "cancelled" : "failed";
  const figure = (kind, name, ...value) => h("div", { class: `figure f-${kind}` }, h("dt", { text: name }), h("dd", {}, value));
  return h(
    "dl",
    { class: "figures" },
    figure("all", "time to first token", h("b", { text: "–" })),
    figure(kind, `${ending(request)} after`, h("b", { text: ms(request.failed_after) }), h("span", { text: " ms" })),
    figure(
      `${kind} f-where`,
      `${ending(request)} in`,
      h("b", { text: placeOf(request) }),
      names.length ? h("small", { text: `not stamped by anybody: ${names.join(", ")}` }) : null,
    ),
  );
}

/** Where a failed attempt was, as a bar of its parts; nothing where it gave a first token, or has not said. */
export function brokenAt(attempt, spans) {
  const failed_in = attempt.attributes?.["pdserve.failed_in"];
  if (!failed_in) return null;
  const own = spans.filter((span) => span.parent_id === attempt.span_id && span.name.startsWith("pdserve."));
  const parts = Object.fromEntries(own.map((span) => [span.name.slice("pdserve.".length), span.duration_us / 1e6]));
  const row = {
    parts,
    failed_in,
    failed_or_later: [attempt.attributes["pdserve.failed_in.or_later"] ?? []].flat(),
    outcome: leftBy(attempt) ? "cancelled" : "failed",
  };
  return h(
    "span",
    { class: "broken-at" },
    h("span", { text: `in ${placeOf(row)}` }),
    stack(row, attempt.duration_us / 1e6),
  );
}
