// Owns how numbers and times are written. Pure.

const US = "en-US"; // one way of writing numbers for everybody: they are compared and pasted

/** Milliseconds of a duration in seconds, without the unit; a dash where nothing was stamped. */
export function ms(seconds, digits = 3) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  const value = digits === 3 ? microseconds(seconds) / 1000 : seconds * 1000;
  return value.toLocaleString(US, { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Whole microseconds of the whole nanoseconds that stamps have, half to even: `pdserve trace` rounds alike. */
export function microseconds(seconds) {
  const ns = nanoseconds(Math.abs(seconds));
  const whole = Math.floor(ns / 1000);
  const rest = ns - 1000 * whole;
  const us = whole + (rest > 500 || (rest === 500 && whole % 2 === 1) ? 1 : 0);
  return seconds < 0 ? -us : us;
}

const nanoseconds = (seconds) => Math.round(seconds * 1e9);

/** The same with a sign, for differences. */
export function signed(seconds, digits = 3) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  const text = ms(Math.abs(seconds), digits);
  if (!/[1-9]/.test(text)) return `±${text}`;
  return `${seconds < 0 ? "−" : "+"}${text}`;
}

export function percent(part, whole) {
  if (!whole || part === null || part === undefined) return "–";
  return `${((100 * part) / whole).toFixed(1)} %`;
}

export function count(number) {
  return number === null || number === undefined ? "–" : Number(number).toLocaleString(US);
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${Number(number) === 1 ? one : many}`;
}

export function bytes(number) {
  if (number === null || number === undefined) return "–";
  let value = Number(number);
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024 || unit === "GiB") return `${value.toFixed(unit === "B" || value >= 100 ? 0 : 1)} ${unit}`;
    value /= 1024;
  }
  return "";
}

const two = (number) => String(number).padStart(2, "0");

/** Time of day of epoch microseconds, to the millisecond. */
export function clock(us, withMs = true) {
  const at = new Date(us / 1000);
  const text = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  return withMs ? `${text}.${String(at.getMilliseconds()).padStart(3, "0")}` : text;
}

export function day(us) {
  const at = new Date(us / 1000);
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
}

/** A round number that is at least `value`: 1, 2 or 5 times a power of ten. */
export function roundUp(value) {
  if (!(value > 0)) return 1e-3;
  const power = 10 ** Math.floor(Math.log10(value));
  for (const step of [1, 2, 5, 10]) if (value <= step * power * (1 + 1e-9)) return step * power;
  return 10 * power;
}

/** Round tick values from 0 to about `top`, some `wanted` of them. */
export function ticks(top, wanted) {
  const step = roundUp(top / wanted);
  const found = [];
  for (let index = 0; index * step <= top * (1 + 1e-9); index++) found.push(index * step);
  return found;
}

/** A tick in milliseconds with no more digits than it needs. */
export function tick(seconds) {
  return Number((seconds * 1000).toPrecision(6)).toLocaleString(US, { maximumFractionDigits: 6 });
}

/** Whole microseconds whose sum is that of `total`: what rounding down loses goes to the largest remainders, among
    equals to the first, as `pdserve trace` does it. Null where the values do not add up to `total` to begin with. */
export function apportion(values, total) {
  const exact = values.map(nanoseconds);
  if (Math.abs(exact.reduce((sum, ns) => sum + ns, 0) - nanoseconds(total)) > 500) return null;
  const shares = exact.map((ns) => Math.floor(ns / 1000));
  const left = microseconds(total) - shares.reduce((sum, us) => sum + us, 0);
  const order = exact.map((ns, index) => [ns - 1000 * shares[index], index]).sort((a, b) => b[0] - a[0]);
  for (const [, index] of order.slice(0, Math.max(left, 0))) shares[index] += 1;
  if (left < 0) shares[shares.indexOf(Math.max(...shares))] += left; // the whole is a little less than its parts
  return shares;
}
