// All state that is worth a link is in the address: /e/ID?view=tree&node=17. An exported file has it behind the #.
import {computed, signal} from '@preact/signals';
import data from 'studio/data';

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
