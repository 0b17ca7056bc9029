// Owns one row of the list: how a request is said in one line.

import { h } from "./dom.js";
import { clock, count, day, ms, plural } from "./format.js";
import { exactParts, hasFailed, placeOf, stack } from "./parts.js";

export const OUTCOMES = { finished: "✓", failed: "✕", cancelled: "⊘" };

export const modeName = (mode) => ({ read: "READ", write: "WRITE" })[mode] ?? "alone";

export function outcomeMark(outcome) {
  return h(
    "span",
    { class: `outcome o-${outcome}` },
    h("span", { "aria-hidden": "true", text: `${OUTCOMES[outcome] ?? "?"} ` }),
    outcome,
  );
}

/** A row that `set` fills; `opened` hears of the request when somebody goes there. */
export function newRow(legend, opened) {
  const cell = (column) => h("span", { role: "cell", class: `c-${column}` });
  const link = h("a", {});
  const cells = Object.fromEntries(
    ["time", "mode", "what", "tok", "ser", "rdma", "ttft", "bar"].map((name) => [name, cell(name)]),
  );
  const who = h("span", { role: "cell", class: "c-who" }, link);
  const { time, mode, what, ...others } = cells;
  const element = h("div", { role: "row", class: "row" }, time, who, mode, what, ...Object.values(others));
  let request;
  let key = "";
  element.addEventListener("click", (event) => {
    if (!event.target.closest("a") && !getSelection().toString()) link.click();
  });
  link.addEventListener("click", () => opened(request));
  for (const name of ["mouseenter", "focusin"]) element.addEventListener(name, () => legend.tell(request));
  for (const name of ["mouseleave", "focusout"]) element.addEventListener(name, () => legend.tell(null));

  function set(next, scale) {
    const now = JSON.stringify([next, scale]);
    if (now === key) return;
    key = now;
    request = next;
    element.dataset.trace = next.trace_id;
    link.href = `#/request/${[next.trace_id, next.request_id].filter(Boolean).map(encodeURIComponent).join("/")}`;
    link.textContent = next.request_id || next.trace_id;
    link.title = link.textContent;
    cells.time.replaceChildren(
      h("time", {
        datetime: new Date(next.start_us / 1000).toISOString(),
        title: day(next.start_us),
        text: clock(next.start_us),
      }),
    );
    cells.mode.textContent = modeName(next.mode);
    cells.what.replaceChildren(
      outcomeMark(next.outcome),
      ...tries(next).map((text) => h("span", { class: "tag", text })),
    );
    cells.tok.replaceChildren(
      count(next.input_tokens),
      " → ",
      h("span", { class: "out", text: count(next.output_tokens) }),
    );
    // Of a request without a first token they are no parts of a TTFT: its bar has them.
    const parts = hasFailed(next) ? {} : exactParts(next);
    cells.ser.textContent = ms(parts["proxy.serialization"]);
    cells.rdma.textContent = ms(parts["kv.wait"]);
    cells.ttft.textContent = ms(next.ttft);
    for (const [name, seconds] of [
      ["ttft", next.ttft],
      ["ser", parts["proxy.serialization"]],
      ["rdma", parts["kv.wait"]],
    ])
      cells[name].classList.toggle("none", seconds === null || seconds === undefined);
    const why =
      next.outcome === "finished" || !next.reason
        ? null
        : h("span", { class: next.outcome === "failed" ? "why" : "why calm", text: next.reason + where(next) });
    cells.bar.replaceChildren(stack(next, scale), ...(why ? [why] : []));
  }
  return { element, set };
}

/** Where a request ended, and when; nothing where it has not said. */
const where = (request) =>
  hasFailed(request) ? ` in ${placeOf(request)} after ${ms(request.failed_after)} ms` : "";

/** What went wrong on the way to an answer, in words. */
export function tries(request) {
  const said = [];
  if (request.fallbacks) said.push(plural(request.fallbacks, "retry", "retries"));
  if (request.continuations) said.push(`continued ${request.continuations}×`);
  return said;
}
