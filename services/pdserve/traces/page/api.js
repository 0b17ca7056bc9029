// Owns the talk with the API: each call has a deadline, each failure is an ApiError in words for people.

const DEADLINE_MS = 10_000;

export class ApiError extends Error {
  constructor(path, said, status = 0) {
    super(`${path}: ${said}`);
    this.status = status;
  }
}

/** GET; `wants` names the field that the answer must have. Raises ApiError, or AbortError once `signal` is aborted. */
export async function get(path, query, wants, signal) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== undefined);
  const url = given.length ? `${path}?${new URLSearchParams(given)}` : path;
  let text;
  let answer;
  try {
    answer = await fetch(url, {
      signal: AbortSignal.any([signal, AbortSignal.timeout(DEADLINE_MS)]),
      cache: "no-store",
    });
    text = await answer.text();
  } catch (error) {
    if (signal.aborted) throw error;
    const late = error.name === "TimeoutError";
    throw new ApiError(url, late ? `no answer within ${DEADLINE_MS / 1000} s` : "the trace store cannot be reached");
  }
  if (!answer.ok) throw new ApiError(url, `${answer.status} ${answer.statusText}${reasonIn(text)}`, answer.status);
  let body;
  try {
    body = JSON.parse(text);
  } catch {
    throw new ApiError(url, `answered with something that is no JSON: ${short(text)}`);
  }
  if (body === null || typeof body !== "object" || !(wants in body)) {
    throw new ApiError(url, `answered without "${wants}": ${short(text)}`);
  }
  return body;
}

function reasonIn(text) {
  try {
    const body = JSON.parse(text);
    const said = body.errors?.[0]?.msg ?? body.error?.message ?? body.error ?? body.message;
    if (typeof said === "string") return `: ${short(said)}`;
  } catch {
    // no JSON: the text itself is shown
  }
  return text.trim() ? `: ${short(text)}` : "";
}

const short = (text) => (text.length > 200 ? `${text.slice(0, 200)}…` : text);

/** Calls `once` now and again `everyMs` after it has ended, until `signal` is aborted; not while the page is hidden
    or paused. `failed` gets the error, or null when all is well again. */
export function poll(once, everyMs, signal, failed) {
  let timer = 0;
  let paused = false;
  let running = false;
  let again = false;
  async function turn() {
    clearTimeout(timer);
    if (running) {
      again = true;
      return;
    }
    running = true;
    again = false;
    try {
      await once();
      failed(null);
    } catch (error) {
      if (signal.aborted) return;
      failed(error);
    } finally {
      running = false;
    }
    if (again) turn();
    else plan();
  }
  function plan() {
    clearTimeout(timer);
    if (!signal.aborted && !paused && !document.hidden) timer = setTimeout(turn, everyMs);
  }
  document.addEventListener("visibilitychange", () => (document.hidden || paused ? clearTimeout(timer) : turn()), {
    signal,
  });
  signal.addEventListener("abort", () => clearTimeout(timer));
  turn();
  return {
    now: turn,
    pause(value) {
      paused = value;
      if (paused) clearTimeout(timer);
      else turn();
    },
  };
}
