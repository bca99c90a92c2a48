// What happens while a page is open: the server says it, and whoever listens asks again for what has changed.
import {useEffect, useRef} from 'preact/hooks';
import {exported, forget} from 'studio/base/api';
import {go} from 'studio/base/route';

const KINDS = ['began', 'grew', 'ended', 'gone', 'scored', 'label', 'stage', 'metric', 'reset'];
const GATHERED = 60;
const listeners = new Set();
let waiting = [];

/** `heard(events)`: what was said within a moment, as `[{kind, ...data}]`. */
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
  for (const {kind, ids} of events) {
    if (kind === 'metric' || kind === 'stage') forget('runs');
    else {
      forget('facets');
      forget('groups');
      forget('compare');
      for (const id of ids ?? []) forget(`episodes/${encodeURIComponent(id)}`);
      if (kind === 'reset') forget('');
    }
  }
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
  // What happened between the first answers and now is told by nobody: whoever shows a list looks again.
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
