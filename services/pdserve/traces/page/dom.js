// Owns how elements are made and kept: data only ever becomes text and attributes, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `props`: class, text, style (CSS properties), on (listeners), anything else an attribute. */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** The same for SVG. */
export function s(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [key, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "text") element.textContent = value;
    else if (key === "style") for (const [name, css] of Object.entries(value)) element.style.setProperty(name, css);
    else if (key === "on")
      for (const [name, listener] of Object.entries(value)) element.addEventListener(name, listener);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Text that is read out and not seen. */
export function unseen(text) {
  return h("span", { class: "unseen", text });
}

/** Makes the children of `parent` those of `wanted`, in order, and moves none that stays in place: one
    that is moved would lose its focus. */
export function arrange(parent, wanted) {
  const keep = new Set(wanted);
  for (const child of [...parent.children]) if (!keep.has(child)) child.remove();
  let at = parent.firstElementChild;
  for (const child of wanted) {
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
  }
}

/** Arrow keys, Home and End move the focus among the elements that `items()` lists. */
export function arrows(container, items, keys = ["ArrowUp", "ArrowDown"]) {
  container.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const all = items();
    const now = all.indexOf(document.activeElement);
    if (now < 0) return;
    const to = { [keys[0]]: now - 1, [keys[1]]: now + 1, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = all[Math.min(Math.max(to, 0), all.length - 1)];
    next.focus({ preventScroll: true });
    next.scrollIntoView({ block: "nearest" });
  });
}

/** A labelled `<select>`; `options` are [value, text] pairs. */
export function choice(label, options, value, chosen) {
  const select = h("select", { on: { change: () => chosen(select.value) } });
  offer(select, options, value);
  return h("label", { class: "choice" }, h("span", { text: label }), select);
}

/** Gives a `<select>` these options; a value that is not among them is added, so that it stays chosen. */
export function offer(select, options, value) {
  const all = options.some(([each]) => each === value) ? options : [...options, [value, value]];
  const key = JSON.stringify(all);
  if (select.dataset.key !== key) {
    select.dataset.key = key;
    select.replaceChildren(...all.map(([each, text]) => h("option", { value: each, text })));
  }
  select.value = value;
}
