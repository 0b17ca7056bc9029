// Owns the legend of the list, which is where exact numbers of a row are read.

import { h } from "./dom.js";
import { ms, percent } from "./format.js";
import { GROUPS, byGroup, exactParts, shares, swatch } from "./parts.js";

/** The legend; it has the numbers of the row that the pointer or the focus is on, else of all rows. */
export function readout() {
  const values = new Map();
  const element = h("dl", { class: "legend" });
  for (const [name, text] of GROUPS) {
    const value = h("dd", { text: "" });
    values.set(name, value);
    element.append(h("div", { class: `chip k-${name}` }, h("dt", {}, swatch(name), text), value));
  }
  let row = null;
  let all = {};
  function draw() {
    const sums = row ? byGroup(exactly(row)) : all;
    element.classList.toggle("of-row", row !== null);
    for (const [name, value] of values) {
      if (!(name in sums)) value.textContent = "–";
      else if (row) value.textContent = `${ms(sums[name])} ms`;
      else value.replaceChildren(percent(sums[name], 1), h("span", { class: "of", text: " of all" }));
    }
  }
  return {
    element,
    tell(request) {
      row = request;
      draw();
    },
    rest(requests) {
      all = shares(requests);
      if (!row) draw();
    },
  };
}

/** The request with its parts as its own table writes them. */
function exactly(request) {
  const { unattributed, ...parts } = exactParts(request);
  return { ...request, parts, unattributed };
}
