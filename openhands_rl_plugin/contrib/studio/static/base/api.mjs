// What the server says, and what to show while it has not said it yet. In an exported file the answers are in the file.
import {useLayoutEffect, useRef, useState} from 'preact/hooks';
import {signal} from '@preact/signals';
import data from 'studio/data';
import {localAnswer} from 'studio/base/local';

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
