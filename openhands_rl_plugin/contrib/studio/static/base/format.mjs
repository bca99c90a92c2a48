// Numbers, times and durations as people read them. Unknown is a dash, never a zero.
export const DASH = '–';

export const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);

/** A reward or value: at most two decimals, without trailing zeros. */
export const reward = (value) => (known(value) ? String(Math.round(value * 100) / 100).replace('-', '−') : DASH);

export const fixed = (value, digits = 2) => (known(value) ? value.toFixed(digits).replace('-', '−') : DASH);

const grouped = new Intl.NumberFormat('en');
export const count = (value) => (known(value) ? grouped.format(value) : DASH);

/** 35,120 -> 35.1k; for places where the magnitude matters. */
export function short(value) {
  if (!known(value)) return DASH;
  if (Math.abs(value) < 1000) return String(Math.round(value * 100) / 100);
  for (const [size, unit] of [[1e9, 'G'], [1e6, 'M'], [1e3, 'k']]) {
    if (Math.abs(value) >= size) return `${(value / size).toFixed(Math.abs(value) < 10 * size ? 1 : 0)}${unit}`;
  }
}

export function seconds(value) {
  if (!known(value)) return DASH;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 90) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 5400) return `${(value / 60).toFixed(1)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

const day = new Intl.DateTimeFormat('sv-SE', {dateStyle: 'short'});
const minute = new Intl.DateTimeFormat('sv-SE', {dateStyle: 'short', timeStyle: 'short'});
const clock = new Intl.DateTimeFormat('sv-SE', {timeStyle: 'short'});

/** Unix seconds as a date and time of this browser's zone. */
export const moment = (at) => (known(at) ? minute.format(at * 1000) : DASH);

/** Today's times without the date. */
export function when(at) {
  if (!known(at)) return DASH;
  const date = at * 1000;
  return day.format(date) === day.format(Date.now()) ? clock.format(date) : minute.format(date);
}

export const percent = (share) => (known(share) ? `${Math.round(share * 100)} %` : DASH);

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

/** `shop-v000007` as people say it. */
export const policy = (adapter, version, model) => (adapter ? `${adapter} v${version ?? '?'}` : model ?? DASH);
