// Owns which view is shown: the address after # chooses it, and a view ends when another one begins.

import { ApiError } from "./api.js";
import { h } from "./dom.js";
import { compare } from "./compare.js";
import { overTime } from "./overtime.js";
import { oneRequest } from "./request.js";
import { requests } from "./requests.js";

const main = document.getElementById("main");
const problem = document.getElementById("problem");
const VIEWS = { "": requests, request: oneRequest, compare, time: overTime };
let leave = new AbortController();
let visits = 0;
let last = "";

/** An error stays to be read until the view works again or another is opened. */
function failed(error) {
  const text = error === null ? "" : error instanceof ApiError ? error.message : `This page failed: ${error}`;
  if (problem.textContent !== text) problem.replaceChildren(...(text ? [h("span", { text })] : []));
  if (error !== null && !(error instanceof ApiError)) console.error(error);
}

function show() {
  // The skip link's own target is no view.
  if (location.hash === "#main") return;
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  const view = Object.hasOwn(VIEWS, name) ? VIEWS[name] : nowhere;
  leave.abort();
  leave = new AbortController();
  failed(null);
  for (const link of document.querySelectorAll("nav [data-view]")) {
    const here = link.dataset.view === (name === "" || name === "request" ? "requests" : name);
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const params = new URLSearchParams(query ?? "");
  const first = visits++ === 0;
  main.replaceChildren();
  window.scrollTo(0, 0);
  view(main, {
    params,
    rest: rest.map(decode),
    signal: leave.signal,
    from: last,
    failed,
    replace: (next) => replace(name, next),
  });
  last = name === "" ? "requests" : name;
  // Whoever navigated hears where they are; whoever just came keeps the browser's own start.
  if (!first && !main.contains(document.activeElement)) main.querySelector("h1")?.focus({ preventScroll: true });
  document.title = `${main.querySelector("h1")?.textContent ?? ""} · pdserve traces`;
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** The address of the same view with other settings, without a step in the history. */
function replace(name, settings) {
  const given = Object.entries(settings).filter(([, value]) => value !== "");
  history.replaceState(null, "", `#/${name}${given.length ? `?${new URLSearchParams(given)}` : ""}`);
}

function nowhere(root) {
  root.append(
    h("h1", { tabindex: "-1", text: "No such view" }),
    h("p", {}, "There is nothing at this address. ", h("a", { href: "#/", text: "Recent requests" }), " is the start."),
  );
}

window.addEventListener("unhandledrejection", (event) => failed(event.reason));
window.addEventListener("error", (event) => failed(event.error ?? event.message));
window.addEventListener("hashchange", show);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
const open = document.querySelector(".open");
open.addEventListener("submit", (event) => {
  event.preventDefault();
  const id = open.elements.id.value.trim();
  if (!id) return;
  open.reset();
  open.elements.id.blur(); // so that the view which opens takes the focus
  location.hash = `#/request/${encodeURIComponent(id)}`;
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest?.("input, select, textarea")) return;
  event.preventDefault();
  open.elements.id.focus();
});
history.scrollRestoration = "manual";
show();
