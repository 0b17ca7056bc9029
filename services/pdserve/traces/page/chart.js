// Owns the line chart: three quantiles over time, an axis each way, and a cursor for pointer and keyboard.

import { h, s } from "./dom.js";
import { clock, day, plural, tick, ticks } from "./format.js";

const LINES = ["P50", "P90", "P99"];
const HEIGHT = 320;
const PAD = { top: 14, right: 52, bottom: 44, left: 74 };
const COUNTS = 18; // height of the strip that shows how many requests a bucket had
const TIME_STEPS = [60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

/** A chart that `set` fills; `label()` names what it shows, `value` writes a value without its unit. */
export function chart({ label, value, signal }) {
  const svg = s("svg", { height: HEIGHT, "aria-hidden": "true", focusable: "false" });
  const said = h("output", { class: "said" });
  const frame = h("div", { class: "chart", role: "slider", tabindex: "0", "aria-orientation": "horizontal" }, svg);
  const element = h(
    "figure",
    {},
    said,
    frame,
    h("p", { class: "keys", text: "← → move the cursor · Home and End go to the ends" }),
  );
  let points = [];
  let range = { wide: 3600, bucket: 60 };
  let chosen = 0; // start of the bucket under the cursor; 0: the newest one
  let place = null;

  const full = () => points.filter((point) => point.count);
  const current = () => full().find((point) => point.at === chosen) ?? full().at(-1);

  function draw() {
    const width = frame.clientWidth;
    if (!width || !points.length) return;
    place = layout(points, range, width);
    svg.setAttribute("width", width);
    svg.replaceChildren(
      ...axes(place, width),
      ...counts(place),
      ...LINES.flatMap((_, index) => line(place, index)),
      ...names(place),
    );
    tell();
  }

  function tell() {
    svg.querySelector(".cursor")?.remove();
    const now = current();
    if (!now || !place) return;
    const words = LINES.map((name, index) => `${name} ${value(now.values[index])} ms`).join(", ");
    const when = `${day(now.at)} ${clock(now.at, false)}`;
    said.replaceChildren(
      h("b", { text: clock(now.at, false) }),
      ...LINES.map((name, index) =>
        h(
          "span",
          { class: `v v${index}` },
          h("i", { class: `key q${index}` }),
          `${name} `,
          h("b", { text: value(now.values[index]) }),
          " ms",
        ),
      ),
      h("span", { text: plural(now.count, "request") }),
    );
    const list = full();
    frame.setAttribute("aria-label", `${label()} over time`);
    frame.setAttribute("aria-valuemin", "1");
    frame.setAttribute("aria-valuemax", String(list.length));
    frame.setAttribute("aria-valuenow", String(list.indexOf(now) + 1));
    frame.setAttribute("aria-valuetext", `${when}: ${words}, ${plural(now.count, "request")}`);
    const x = place.x(now.at);
    svg.append(
      s(
        "g",
        { class: "cursor" },
        s("line", { x1: x, x2: x, y1: PAD.top, y2: place.bottom }),
        ...now.values.map((each, index) =>
          each === undefined ? null : s("circle", { class: `q${index}`, cx: x, cy: place.y(each), r: 4 }),
        ),
      ),
    );
  }

  function move(to) {
    const list = full();
    if (!list.length) return;
    const next = Math.min(Math.max(to, 0), list.length - 1);
    chosen = next === list.length - 1 ? 0 : list[next].at; // at the newest it stays at the newest
    tell();
  }

  frame.addEventListener("keydown", (event) => {
    const now = full().indexOf(current());
    const to = {
      ArrowLeft: now - 1,
      ArrowRight: now + 1,
      ArrowDown: now - 1,
      ArrowUp: now + 1,
      PageUp: now + 10,
      PageDown: now - 10,
      Home: 0,
      End: points.length,
    }[event.key];
    if (to === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    move(to);
  });
  frame.addEventListener("pointermove", (event) => {
    if (!place) return;
    const x = event.clientX - svg.getBoundingClientRect().left;
    const distance = full().map((point) => Math.abs(place.x(point.at) - x));
    move(distance.indexOf(Math.min(...distance)));
  });
  const watch = new ResizeObserver(draw);
  watch.observe(frame);
  signal.addEventListener("abort", () => watch.disconnect());

  return {
    element,
    set(next, nextRange) {
      points = next;
      range = nextRange;
      draw();
    },
  };
}

function layout(points, { wide, bucket }, width) {
  // The window ends now; where this clock is far from the server's, it ends with the newest bucket.
  const newest = points.at(-1).at + bucket * 1e6;
  const now = Date.now() * 1000;
  const last = now > newest && newest > now - wide * 1e6 ? now : newest;
  const first = Math.min(points[0].at, last - wide * 1e6);
  const bottom = HEIGHT - PAD.bottom - COUNTS;
  const top = Math.max(1e-6, ...points.flatMap((point) => point.values.filter((each) => each !== undefined)));
  const marks = ticks(top, 5);
  const step = marks[1] - marks[0];
  if (marks.at(-1) < top) marks.push(marks.at(-1) + step);
  const x = (us) => PAD.left + ((us + bucket * 5e5 - first) / (last - first)) * (width - PAD.left - PAD.right);
  const y = (seconds) => bottom - (seconds / marks.at(-1)) * (bottom - PAD.top);
  return { points, first, last, wide, bucket, bottom, marks, x, y, right: width - PAD.right };
}

function axes({ marks, y, right, bottom, first, last, bucket, x }, width) {
  const found = [];
  for (const mark of marks) {
    found.push(s("line", { class: mark ? "grid" : "base", x1: PAD.left, x2: right, y1: y(mark), y2: y(mark) }));
    found.push(s("text", { x: PAD.left - 8, y: y(mark) + 4, "text-anchor": "end" }, mark ? `${tick(mark)} ms` : "0"));
  }
  const seconds = (last - first) / 1e6;
  const wanted = Math.max(2, Math.floor((right - PAD.left) / 90));
  const step = TIME_STEPS.find((each) => seconds / each <= wanted) ?? TIME_STEPS.at(-1);
  const zone = new Date(first / 1000).getTimezoneOffset() * 60; // marks at whole local hours
  for (let at = Math.ceil((first / 1e6 - zone) / step) * step + zone; at * 1e6 <= last; at += step) {
    const where = x(at * 1e6 - bucket * 5e5);
    if (where > width - 20) continue;
    const text = step >= 86400 ? day(at * 1e6).slice(5) : clock(at * 1e6, false).slice(0, 5);
    found.push(s("line", { class: "mark", x1: where, x2: where, y1: bottom + COUNTS + 6, y2: bottom + COUNTS + 11 }));
    found.push(s("text", { x: where, y: bottom + COUNTS + 25, "text-anchor": "middle" }, text));
  }
  found.push(s("line", { class: "base", x1: PAD.left, x2: right, y1: bottom + COUNTS + 6, y2: bottom + COUNTS + 6 }));
  return found;
}

function counts({ points, x, bottom, bucket, first, last, right }) {
  const most = Math.max(...points.map((point) => point.count), 1);
  const wide = Math.max(1, ((bucket * 1e6) / (last - first)) * (right - PAD.left) - 1);
  const found = points
    .filter((point) => point.count)
    .map((point) => {
      const high = Math.max(1, (point.count / most) * COUNTS);
      return s("rect", {
        class: "count",
        x: x(point.at) - wide / 2,
        y: bottom + COUNTS + 6 - high,
        width: wide,
        height: high,
      });
    });
  return [
    ...found,
    s("text", { class: "unit", x: PAD.left - 8, y: bottom + COUNTS + 4, "text-anchor": "end" }, "requests"),
  ];
}

/** Runs of buckets that have a value; one on its own is a dot. */
function line({ points, x, y, bucket }, index) {
  const runs = [];
  let run = [];
  let before = 0;
  for (const point of points) {
    // Buckets without requests are not in the answer: a line across them would be made up.
    const gap = point.at - before > bucket * 1.5e6;
    before = point.at;
    if (gap && run.length) {
      runs.push(run);
      run = [];
    }
    if (point.values[index] === undefined) {
      if (run.length) runs.push(run);
      run = [];
    } else run.push([x(point.at), y(point.values[index])]);
  }
  if (run.length) runs.push(run);
  return runs.map((each) =>
    each.length === 1
      ? s("circle", { class: `dot q${index}`, cx: each[0][0], cy: each[0][1], r: 2.5 })
      : s("polyline", {
          class: `q${index}`,
          points: each.map((pair) => pair.map((n) => n.toFixed(1)).join(",")).join(" "),
        }),
  );
}

/** The lines' names at their right ends, pushed apart where they would lie on each other. */
function names({ points, y, right }) {
  const last = points.filter((point) => point.count).at(-1);
  if (!last) return [];
  const found = LINES.map((name, index) => ({ name, index, at: y(last.values[index] ?? 0) })).sort(
    (a, b) => b.at - a.at,
  );
  for (let i = 1; i < found.length; i++) found[i].at = Math.min(found[i].at, found[i - 1].at - 14);
  return found.map(({ name, index, at }) => s("text", { class: `name n${index}`, x: right + 8, y: at + 4 }, name));
}
