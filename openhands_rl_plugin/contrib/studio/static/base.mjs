// What all pages use: texts, numbers, keys, theme, address, answers of the server, events, labels and lists.
import {computed, effect, signal} from '@preact/signals';
import htm from 'htm';
import {h, options} from 'preact';
import {useEffect, useLayoutEffect, useRef, useState} from 'preact/hooks';
import data from 'studio/data';
export const html = htm.bind(h);
// C0 and C1 controls but tab and line feed, marks and overrides of direction, zero-width and invisible characters.
const ACTING = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
const ANY = new RegExp(ACTING.source);

const escaped = (character) => {
  const code = character.charCodeAt(0);
  return code < 0x100 ? `\\x${code.toString(16).padStart(2, '0')}` : `\\u${code.toString(16).padStart(4, '0')}`;
};
/** The text with every character that would act on a page written out. */
export const plain = (text) => (ANY.test(text) ? text.replace(ACTING, escaped) : text);
// What terminals colour by. Backgrounds and concealment could hide a text, so those say nothing here.
const SGR = /\u001b\[([0-9;]{0,40})m/;
const HUES = ['dim', 'bad', 'good', 'amber', 'blue', 'violet', 'teal', ''];

/** The style after a code: `{hue, bold}`. */
function coloured({hue, bold}, code) {
  const numbers = code.split(';').map(Number);
  for (let at = 0; at < numbers.length; at += 1) {
    const each = numbers[at];
    if (each === 0) [hue, bold] = ['', false];
    else if (each === 1) bold = true;
    else if (each === 22) bold = false;
    else if (each === 39) hue = '';
    else if (each >= 30 && each <= 37) hue = HUES[each - 30];
    else if (each >= 90 && each <= 97) hue = HUES[each - 90];
    else if (each === 38 || each === 48) at += numbers[at + 1] === 5 ? 2 : numbers[at + 1] === 2 ? 4 : 0;
  }
  return {hue, bold};
}

/** The same as nodes: colours of a terminal are colours, and what was written out stands apart from what was there. */
export function Shown({text, most = Infinity}) {
  const whole = String(text ?? '');
  const clipped = whole.length > most ? `${whole.slice(0, most)}…` : whole;
  if (most < Infinity && !clipped.trim()) return html`<i class="muted">(empty)</i>`;
  if (!ANY.test(clipped)) return clipped;
  if (!SGR.test(clipped)) return written(clipped);
  const [first, ...others] = clipped.split(SGR);
  const parts = [written(first)];
  let style = {hue: '', bold: false};
  for (let at = 0; at < others.length; at += 2) {
    style = coloured(style, others[at]);
    const part = written(others[at + 1]);
    const kind = `${style.hue && `ansi ${style.hue}`}${style.bold ? ' strong' : ''}`.trim();
    parts.push(kind && others[at + 1] ? html`<span class=${kind}>${part}</span>` : part);
  }
  return parts;
}

function written(text) {
  const parts = [];
  let from = 0;
  for (const match of text.matchAll(ACTING)) {
    if (match.index > from) parts.push(text.slice(from, match.index));
    // A carriage return before a line feed is how some systems end lines, and means nothing.
    if (match[0] !== '\r' || text[match.index + 1] !== '\n') parts.push(html`<span class="acting">${escaped(match[0])}</span>`);
    from = match.index + 1;
  }
  parts.push(text.slice(from));
  return parts;
}
// So that no page can forget it: every text node and every attribute that is read goes through `plain`.
const READ = ['title', 'aria-label', 'placeholder', 'alt'];
const before = options.vnode;
options.vnode = (vnode) => {
  if (vnode.type === null && typeof vnode.props === 'string') vnode.props = plain(vnode.props);
  else if (typeof vnode.type === 'string') {
    for (const name of READ) if (typeof vnode.props[name] === 'string') vnode.props[name] = plain(vnode.props[name]);
  }
  before?.(vnode);
};
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
const layers = [];
let [prefix, prefixed] = ['', 0];

/** `keys`: key -> [what it does, function]. A key may be two, as "g e". `section`: the heading in the help. */
export function useKeys(section, keys) {
  const layer = useRef({});
  layer.current.section = section;
  layer.current.keys = keys;
  useEffect(() => {
    const own = layer.current;
    layers.push(own);
    return () => { layers.splice(layers.indexOf(own), 1); };
  }, []);
}

/** All keys that do something now: [section, [[key, what]]]. */
export function help() {
  const seen = new Set();
  return [...layers].reverse().map(({section, keys}) => [
    section,
    Object.entries(keys).filter(([key, [what]]) => what && !seen.has(key) && seen.add(key)).map(([key, [what]]) => [key, what]),
  ]).filter(([, rows]) => rows.length);
}
const typing = (target) => target.closest?.('input:not([type=checkbox], [type=radio]), textarea, select, [contenteditable]');

addEventListener('keydown', (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  if (typing(event.target) && event.key !== 'Escape') return;
  if (document.querySelector('dialog[open]') && event.key !== 'Escape') return;
  // Enter and space belong to a button or link that has the focus.
  if ((event.key === 'Enter' || event.key === ' ') && event.target.closest?.('a, button, summary, [role=tab]')) return;
  const key = Date.now() - prefixed < 1500 && prefix ? `${prefix} ${event.key}` : event.key;
  prefix = '';
  for (const {keys} of [...layers].reverse()) {
    if (keys[key]) {
      event.preventDefault();
      keys[key][1](event);
      return;
    }
  }
  if (key === 'g') {
    prefix = 'g';
    prefixed = Date.now();
  }
});

const NAME = 'studio-theme';
const ORDER = ['system', 'light', 'dark'];

function kept() {
  try {
    return localStorage.getItem(NAME);
  } catch {
    return null; // a file, or a browser that keeps nothing
  }
}
export const theme = signal(ORDER.includes(kept()) ? kept() : 'system');
/** Counts changes of the colours in use, for what is painted on a canvas. */
export const repaint = signal(0);

effect(() => {
  if (theme.value === 'system') delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme.value;
  repaint.value = repaint.peek() + 1;
  try {
    localStorage.setItem(NAME, theme.value);
  } catch { /* it holds for this page then */ }
});
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { repaint.value += 1; });

export const nextTheme = () => { theme.value = ORDER[(ORDER.indexOf(theme.value) + 1) % ORDER.length]; };

/** The colour that a custom property has now. */
export function colour(name) {
  const probe = document.createElement('i');
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
const inFile = location.protocol === 'file:';

function read() {
  const address = inFile ? new URL(location.hash.slice(1) || data?.export.start || '/', 'http://x') : new URL(location.href);
  const parts = address.pathname.split('/').filter(Boolean).map(decode);
  return {page: parts[0] ?? '', id: parts.slice(1).join('/'), params: address.searchParams};
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
export const route = signal(read());
const refresh = () => { route.value = read(); };
addEventListener(inFile ? 'hashchange' : 'popstate', refresh);

/** The address of a page. Parameters that are empty are left out. */
export function link(page, id = '', params = {}) {
  const query = new URLSearchParams(Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== ''));
  const path = `/${[page, id].filter(Boolean).map(encodeURIComponent).join('/')}`;
  const address = query.size ? `${path}?${query}` : path;
  return inFile ? `#${address}` : address;
}

export function go(address, {replace = false} = {}) {
  if (inFile && !replace) {
    location.hash = address.slice(1);
    return;
  }
  history[replace ? 'replaceState' : 'pushState'](null, '', address);
  refresh();
}

/** The same page with other parameters; by default no new step in the browser's history. */
export function put(params, {push = false} = {}) {
  const {page, id, params: now} = route.peek();
  go(link(page, id, {...Object.fromEntries(now), ...params}), {replace: !push});
}
/** A parameter of the address as a signal, so that only who reads it is drawn again. */
const signals = new Map();
export function param(name) {
  if (!signals.has(name)) signals.set(name, computed(() => route.value.params.get(name) ?? ''));
  return signals.get(name).value;
}
/** What narrows a list of episodes: fields of an episode, bounds of its reward, and a text that its header contains. */
const FILTERS = ['contains', 'run', 'group', 'task', 'environment', 'split', 'strategy', 'adapter', 'version', 'stop', 'failure', 'min_reward', 'max_reward', 'unlabelled'];
export const filters = () => Object.fromEntries(FILTERS.map((name) => [name, param(name)]).filter(([, value]) => value));

// Links within the studio need no loading; those to a new tab or window stay the browser's.
addEventListener('click', (event) => {
  const anchor = event.target.closest?.('a[href]');
  if (inFile || !anchor || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  if (anchor.target || anchor.hasAttribute('download') || anchor.origin !== location.origin) return;
  event.preventDefault();
  go(anchor.pathname + anchor.search);
});

const CHUNK = 64;
/** Parameters that choose among answers of one address; `reports/answers.py` has the same order. */
const CHOOSING = ['file', 'instance', 'a', 'b'];

export function localAnswer(data, path) {
  const [where, asked = ''] = path.split('?');
  const params = new URLSearchParams(asked);
  const parts = where.split('/').map(decodeURIComponent);
  const chosen = CHOOSING.map((name) => params.get(name)).filter(Boolean).join('&');
  const found = parts[0] === 'episodes' && parts.length > 2 ? ofEpisode(data, parts, params) : chosen ? data[`${parts.join('/')}?${chosen}`] : data[where] ?? data[parts.join('/')];
  if (where === 'episodes' && found) return page(found, params);
  if (found === undefined || found === null) throw new Error('This is not in the exported file.');
  return found;
}

function ofEpisode(data, [, id, what, node, more], params) {
  const whole = data[`episodes/${encodeURIComponent(id)}/${what}${node ? `/${node}/${more}` : ''}`];
  if (what !== 'nodes' || !whole) return whole;
  const from = Number(params.get('from') ?? 0);
  if (node) return whole;
  const end = Math.min(Number(params.get('to') ?? whole.total), from + CHUNK, whole.total);
  return {total: whole.total, next: end < whole.total ? end : null, nodes: cut(whole.nodes, from, end)};
}

function page(whole, params) {
  const from = Number(params.get('offset') ?? 0);
  const end = from + Number(params.get('limit') ?? 100);
  return {...whole, offset: from, rows: cut(whole.rows, from, end)};
}
const cut = (table, from, end) => Object.fromEntries(Object.entries(table).map(([name, column]) => [name, column.slice(from, end)]));
export const exported = data !== null;
/** Set when the server wants to be asked with a session. */
export const signedOut = signal(false);
const KEPT = 200;
const answers = new Map();

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** JSON of a path below /api. `fresh`: ask again; the browser has the old answer's ETag, so what is unchanged costs little. */
export function ask(path, {fresh = false} = {}) {
  if (!fresh && answers.has(path)) return answers.get(path);
  const answer = exported ? Promise.resolve().then(() => localAnswer(data, path)) : request(path);
  answers.delete(path);
  answers.set(path, answer);
  answer.catch(() => answers.get(path) === answer && answers.delete(path));
  if (answers.size > KEPT) answers.delete(answers.keys().next().value);
  return answer;
}

/** Answers about what has changed are asked for again. */
export function forget(beginning) {
  for (const path of answers.keys()) if (path.startsWith(beginning)) answers.delete(path);
}

export async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(`/api/${path}`, options);
  } catch {
    throw new Refused(0, 'The studio does not answer. Is `openhands-rl studio` still running?');
  }
  if (response.status === 401) signedOut.value = true;
  if (response.status === 204) return null;
  const body = await response.json().catch(() => null);
  if (!response.ok) throw new Refused(response.status, body?.error?.message ?? `The studio answered ${response.status}.`);
  return body;
}

export const send = (path, body) =>
  request(path, {method: 'POST', headers: {'Content-Type': 'application/json'}, body: JSON.stringify(body)});

/** `{data, error, loading, again}` of a path. The last answer stays while the next one is on its way, so nothing jumps. */
export function useAnswer(path, {keep = true} = {}) {
  const [state, set] = useState({data: null, error: null, path: null});
  const [turn, again] = useState(0);
  const last = useRef(0);
  // Before the next frame: an answer that is there already is shown in it.
  useLayoutEffect(() => {
    if (path === null) return undefined;
    let wanted = true;
    ask(path, {fresh: turn !== last.current}).then(
      (data) => wanted && set({data, error: null, path}),
      (error) => wanted && set((before) => ({data: keep ? before.data : null, error, path})),
    );
    last.current = turn;
    return () => { wanted = false; };
  }, [path, turn]);
  const stale = state.path !== path;
  return {data: keep || !stale ? state.data : null, error: stale ? null : state.error, loading: stale, again: () => again((n) => n + 1)};
}

/** Parameters as a query; empty ones are left out. */
export function query(params) {
  const kept = Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== '');
  return kept.length ? `?${new URLSearchParams(kept)}` : '';
}
/** Row `at` of a table by columns. A column that is absent is null everywhere. */
export const row = (table, at) => new Proxy(table, {get: (columns, name) => columns[name]?.[at] ?? null});
export const cell = (table, name, at) => table[name]?.[at] ?? null;
export const rowsOf = (table) => Math.max(0, ...Object.values(table).map((column) => column.length));
const KINDS = ['changed', 'run', 'reset'];
const GATHERED = 60;
const listeners = new Set();
let waiting = [];

/** `heard(events)`: the events of a moment, as `[{kind, ...data}]`. */
export function useLive(heard) {
  const last = useRef(heard);
  last.current = heard;
  useEffect(() => {
    const own = (events) => last.current(events);
    listeners.add(own);
    return () => { listeners.delete(own); };
  }, []);
}

function deliver() {
  const events = waiting;
  waiting = [];
  for (const {kind} of events) forget(kind === 'run' ? 'runs' : '');
  for (const each of [...listeners]) each(events);
}

function hear(kind, text) {
  let data = {};
  try {
    data = JSON.parse(text);
  } catch {
    return;
  }
  if (!waiting.length) setTimeout(deliver, GATHERED);
  waiting.push({kind, ...data});
}

/** Begin to listen. The browser comes back by itself when the connection breaks. */
export function listen() {
  if (exported) return;
  const stream = new EventSource('/api/events');
  // No event reports what happened between the first answers and now: whoever shows a list looks again.
  let begun = false;
  stream.addEventListener('open', (event) => {
    // Without data it is the browser's own event, which comes before the server has looked.
    if (begun || event.data === undefined) return;
    begun = true;
    hear('open', event.data);
  });
  for (const kind of KINDS) stream.addEventListener(kind, (event) => hear(kind, event.data));
  addEventListener('pagehide', () => stream.close());
}

export async function label(episode, fields, store) {
  const {labels} = await send(`labels${store ? `?store=${encodeURIComponent(store)}` : ''}`, {episode, ...fields});
  forget(`episodes/${encodeURIComponent(episode)}`);
  forget('facets');
  return labels;
}

export const words = {
  verdict: (each) => (each.value === null ? 'verdict' : each.value >= 1 ? 'good' : each.value <= 0 ? 'bad' : `verdict ${each.value}`),
  preference: (each) => (each.value > 0.5 ? `better than ${each.other}` : each.value < 0.5 ? `worse than ${each.other}` : `as good as ${each.other}`),
  comment: () => '',
  tag: () => '',
};
export const PAGE = 100;
const lists = new Map();

class Listing {
  constructor(params) {
    this.params = params;
    this.pages = new Map();
    this.asked = new Map();
    /** Rows in all; null until the first page is there. */
    this.total = signal(null);
    this.error = signal(null);
    /** Goes up with each page that has come. */
    this.tick = signal(0);
  }
  /** The row with a number, or null while its page is on its way. */
  row(number) {
    const rows = this.pages.get(Math.floor(number / PAGE));
    const at = number % PAGE;
    return rows && at < rowsOf(rows) ? row(rows, at) : null;
  }
  /** Whether a row that has come has something in a column. */
  has(column) {
    return [...this.pages.values()].some((rows) => rows[column]?.some((each) => each !== null));
  }
  load(page, {fresh = false} = {}) {
    if (page < 0 || (!fresh && this.asked.has(page))) return this.asked.get(page);
    const path = `episodes${query({...this.params, offset: page * PAGE, limit: PAGE})}`;
    const answer = ask(path, {fresh}).then((found) => {
      this.pages.set(page, found.rows);
      this.total.value = found.total;
      this.error.value = null;
      this.tick.value += 1;
    }, (error) => {
      this.error.value = error;
    });
    this.asked.set(page, answer);
    return answer;
  }
  /** Ask again for all that is known, for example after an episode has ended. The old rows stay until then. */
  refresh() {
    const known = [...this.pages.keys()].slice(-4);
    for (const page of this.asked.keys()) if (!known.includes(page)) { this.asked.delete(page); this.pages.delete(page); }
    return Promise.all((known.length ? known : [0]).map((page) => this.load(page, {fresh: true})));
  }
  async idAt(number) {
    if (number < 0 || (this.total.peek() !== null && number >= this.total.peek())) return null;
    await this.load(Math.floor(number / PAGE));
    return this.row(number)?.id ?? null;
  }
}

/** The list for `{store, sort}` and filters; the same one for the same values. */
export function listing(params) {
  const key = query(params);
  if (!lists.has(key)) {
    if (lists.size > 8) lists.delete(lists.keys().next().value);
    lists.set(key, new Listing(params));
  }
  const found = lists.get(key);
  found.load(0);
  return found;
}
/** Ids that the user marked, in the order of marking. */
export const marked = signal([]);

export const mark = (id) => {
  marked.value = marked.value.includes(id) ? marked.value.filter((each) => each !== id) : [...marked.value, id];
};
