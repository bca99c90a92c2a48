// One listener for the keyboard. A component adds its keys while it is on the page; the newest one wins.
import {useEffect, useRef} from 'preact/hooks';

const layers = [];
let prefix = '';
let prefixed = 0;

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

const typing = (target) => target.closest?.('input, textarea, select, [contenteditable]');

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
