// One episode as the views want it: who is below whom, what was acted on, and bodies when they are needed.
import {useLayoutEffect, useState} from 'preact/hooks';
import {ask, cell, query} from 'studio/base/api';

const CHUNK = 32;

/** `header` of /api/episodes/{id}, with the shape of its tree. */
export function modelOf(header) {
  const {nodes} = header;
  const total = nodes.role.length;
  const children = Array.from({length: total}, () => []);
  const roots = [];
  for (let at = 0; at < total; at += 1) {
    const parent = cell(nodes, 'parent', at);
    (parent === null ? roots : children[parent]).push(at);
  }
  const of = (name) => (at) => cell(nodes, name, at);
  const acted = range(total).filter(of('acted'));
  const answers = acted.filter(of('sampled'));
  return {header, nodes, total, children, roots, acted, answers, of, items: itemsOf(nodes, acted)};
}

const range = (total) => Array.from({length: total}, (_, at) => at);

/** Messages in order; what tools answered stands with the call that asked for it. */
function itemsOf(nodes, acted) {
  const items = [];
  for (const at of acted) {
    const last = items.at(-1);
    const follows = cell(nodes, 'role', at) === 'tool' && last && cell(nodes, 'calls', last.node);
    if (follows) last.answers.push(at);
    else items.push({node: at, answers: [], segment: cell(nodes, 'segment', at)});
  }
  let segment = null;
  for (const item of items) {
    item.begins = item.segment !== null && segment !== null && item.segment !== segment;
    segment = item.segment ?? segment;
  }
  return items;
}

/** The nodes beside one that answer the same. */
export function siblings(model, at) {
  const parent = model.of('parent')(at);
  return parent === null ? model.roots : model.children[parent];
}

async function chunk(id, at, total, store) {
  const found = {};
  const end = Math.min(total, (at + 1) * CHUNK);
  for (let from = at * CHUNK; from !== null && from < end;) {
    const page = await ask(`episodes/${encodeURIComponent(id)}/nodes${query({from, to: end, store})}`);
    const {node, ...columns} = page.nodes;
    (node ?? []).forEach((number, place) => {
      found[number] = Object.fromEntries(Object.entries(columns).map(([name, column]) => [name, column[place]]));
    });
    from = page.next;
  }
  return found;
}

/** The whole message of a node: null while it is on its way, `{error}` where it did not come. */
export function useBody(model, at, store, wanted = true) {
  const [body, set] = useState(null);
  useLayoutEffect(() => {
    if (!wanted) return undefined;
    let here = true;
    chunk(model.header.id, Math.floor(at / CHUNK), model.total, store).then((found) => here && set(found[at] ?? {}), (error) => here && set({error}));
    return () => { here = false; };
  }, [model.header.id, model.total, at, wanted]);
  return body;
}

/** The rest of a text that was cut, from character `skip` on. */
export async function more(id, at, skip, store) {
  const page = await ask(`episodes/${encodeURIComponent(id)}/nodes${query({from: at, to: at + 1, skip, store})}`);
  return {content: page.nodes.content?.[0] ?? '', rest: page.nodes.rest?.[0] ?? null};
}
