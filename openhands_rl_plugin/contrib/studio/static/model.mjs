// An episode as the views read it: its nodes, the layout of its tree, differences of texts, tokens and their colours.
import {hierarchy, tree} from 'd3-hierarchy';
import {useLayoutEffect, useState} from 'preact/hooks';
import {ask, cell, query, rowsOf} from 'studio/base';
const MOST_COMPARED = 1500;

/** [[" " | "-" | "+", item], ...]: what stays, goes and comes. */
export function diff(before, after) {
  let head = 0;
  while (head < before.length && head < after.length && before[head] === after[head]) head += 1;
  let tail = 0;
  while (tail < before.length - head && tail < after.length - head && before.at(-1 - tail) === after.at(-1 - tail)) tail += 1;
  const a = before.slice(head, before.length - tail);
  const b = after.slice(head, after.length - tail);
  const middle = a.length * b.length > MOST_COMPARED * MOST_COMPARED ? [...a.map((each) => ['-', each]), ...b.map((each) => ['+', each])] : longest(a, b);
  return [...before.slice(0, head).map((each) => [' ', each]), ...middle, ...before.slice(before.length - tail).map((each) => [' ', each])];
}

function longest(a, b) {
  const width = b.length + 1;
  const table = new Uint32Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      table[i * width + j] = a[i] === b[j] ? table[(i + 1) * width + j + 1] + 1 : Math.max(table[(i + 1) * width + j], table[i * width + j + 1]);
    }
  }
  const steps = [];
  let i = 0;
  let j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { steps.push([' ', a[i]]); i += 1; j += 1; }
    else if (j >= b.length || (i < a.length && table[(i + 1) * width + j] >= table[i * width + j + 1])) { steps.push(['-', a[i]]); i += 1; }
    else { steps.push(['+', b[j]]); j += 1; }
  }
  return steps;
}

/** Lines with at most `around` unchanged ones about each change; `['…', n]` stands for n that are left out. */
export function hunks(steps, around = 3) {
  const near = new Set();
  steps.forEach(([sign], at) => { if (sign !== ' ') for (let n = at - around; n <= at + around; n += 1) near.add(n); });
  const shown = [];
  let skipped = 0;
  steps.forEach((step, at) => {
    if (near.has(at)) {
      if (skipped) shown.push(['…', skipped]);
      skipped = 0;
      shown.push(step);
    } else skipped += 1;
  });
  if (skipped) shown.push(['…', skipped]);
  return shown;
}
export const STEP = 132;
export const ROW = 22;
const MOST = 12;
const ALL = 120;

/** A node of what is drawn: `node` of the episode with `hidden` answers below it, or `stack`, siblings that are not drawn. */
function grown(model, at, acted, open) {
  const all = below(model, at, acted);
  // A search is read along what was acted on; the rest of it opens when it is asked for.
  if (!open.all && !acted.has(at) && !open.has(at)) return {node: at, hidden: all.length, children: []};
  let shown = all;
  let stack = [];
  if (all.length > MOST && !open.has(at)) {
    const best = [...all].sort((a, b) => acted.has(b) - acted.has(a) || (model.of('visits')(b) ?? 0) - (model.of('visits')(a) ?? 0) || a - b);
    const kept = new Set(best.slice(0, MOST - 1));
    shown = all.filter((each) => kept.has(each));
    stack = all.filter((each) => !kept.has(each));
  }
  const children = shown.map((each) => grown(model, each, acted, open));
  if (stack.length) children.push({node: null, stack, parent: at, children: []});
  return {node: at, hidden: 0, children};
}

/** The answers below a node; an observation in between is part of the way to them. The one that was acted on
 * stands in the middle, so that the acted path is a straight line. */
function below(model, at, acted) {
  const found = [];
  for (const child of model.children[at]) {
    if (model.of('sampled')(child)) found.push(child);
    else if (model.children[child].length) found.push(...below(model, child, acted));
  }
  const path = found.find((each) => acted.has(each));
  if (path === undefined) return found;
  const others = found.filter((each) => each !== path);
  return [...others.slice(0, others.length / 2), path, ...others.slice(others.length / 2)];
}

/** `{points, width, height}` in pixels. `open`: nodes that are drawn with what is below them; `open.all`: all are. */
export function laidOut(model, open = new Set()) {
  const acted = new Set(model.acted);
  if (model.total <= ALL) open.all = true;
  const first = model.roots.flatMap((root) => (model.of('sampled')(root) ? [root] : [topOf(model, root)]));
  const roots = [...new Set(first)].map((root) => grown(model, root, new Set([...acted, root]), open));
  const whole = roots.length === 1 ? roots[0] : {node: null, stack: [], children: roots};
  const root = tree().nodeSize([ROW, STEP])
    // The label of an acted answer stands above it, where the line leaves room.
    .separation((a, b) => (a.parent === b.parent ? 1 : 1.25) + (acted.has(a.data.node) || acted.has(b.data.node) ? 0.6 : 0))(hierarchy(whole));
  let least = Infinity;
  let most = -Infinity;
  root.each((each) => {
    least = Math.min(least, each.x);
    most = Math.max(most, each.x);
  });
  const points = root.descendants().filter((each) => each.data.node !== null || each.data.stack?.length).map((each) => ({
    ...each.data, acted: acted.has(each.data.node), x: each.y + 40, y: each.x - least + 32, from: each.parent && each.parent.data.node !== null ? {x: each.parent.y + 40, y: each.parent.x - least + 32} : null,
  }));
  return {points, width: root.height * STEP + 220, height: most - least + 64};
}

/** The last message before the first answer: the system's and the user's are no branches. */
function topOf(model, at) {
  const [only, ...others] = model.children[at];
  return only !== undefined && !others.length && !model.of('sampled')(only) ? topOf(model, only) : at;
}

/** The answers above and below one, in the order of the drawing. */
export function around(model, at) {
  const acted = new Set(model.acted);
  if (at === null) return {parent: null, children: [...new Set(model.roots.map((root) => topOf(model, root)))]};
  let parent = model.of('parent')(at);
  while (parent !== null && !model.of('sampled')(parent) && model.of('parent')(parent) !== null && !model.roots.map((root) => topOf(model, root)).includes(parent)) parent = model.of('parent')(parent);
  return {parent, children: below(model, at, acted)};
}
const CHUNK = 32;

/** `header` of /api/episodes/{id}, with the shape of its tree. */
export function modelOf(header) {
  const {nodes} = header;
  const total = nodes.role?.length ?? 0;
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
export const PAGE = 4096;
/** A page of the tokens of a node: `{node, from, total, prompt, next, extends, tokenizer, tokens}`. */
export const tokensOf = (id, node, from, store) => ask(`episodes/${encodeURIComponent(id)}/nodes/${node}/tokens${query({from, store})}`);

/** `NODE.PLACE` or `NODE.FIRST-LAST` of an address, or null. Places count from the first token of the prompt. */
export function spanOf(text) {
  const found = /^(\d+)\.(\d+)(?:-(\d+))?$/.exec(text ?? '');
  if (!found) return null;
  const [node, first, last] = found.slice(1).map((each) => (each === undefined ? null : Number(each)));
  return {node, first: Math.min(first, last ?? first), last: Math.max(first, last ?? first)};
}
export const spanText = ({node, first, last}) => `${node}.${first}${last > first ? `-${last}` : ''}`;

/** What was sampled of a span, as labels name it: `{node, tokens: [first, end]}` of the node's sampled tokens, or null. */
export function sampledIn(span, model) {
  const prompt = span && model.of('prompt_tokens')(span.node);
  if (prompt === null || prompt === undefined) return null;
  const tokens = [Math.max(span.first - prompt, 0), Math.min(span.last + 1 - prompt, model.of('sampled_tokens')(span.node))];
  return tokens[0] < tokens[1] ? {node: span.node, tokens} : null;
}

/** The labels that are about a token of a page, by its place in the page. */
export const labelsAt = (labels, page, at) => labels.filter(({node, tokens}) => {
  const place = page.from + at - page.prompt;
  return tokens && node === page.node && place >= tokens[0] && place < tokens[1];
});

/** The measures that a page may have; a column that nobody recorded is not offered. */
export const COLOURS = {
  logprob: {name: 'logprob', columns: ['logprob'], of: (t, at) => cell(t, 'logprob', at), span: [-4, 0], scale: 'low', unit: 'nats'},
  advantage: {name: 'advantage', columns: [], of: (t, at, page) => (page.from + at >= page.prompt ? page.advantage ?? null : null), span: [-2, 2], scale: 'both', unit: ''},
  mask: {name: 'mask', columns: [], of: (t, at, page) => (page.from + at >= page.prompt ? 1 : 0), span: [0, 1], scale: 'flag', unit: 'trained or not'},
  turn: {name: 'turn', columns: [], of: (t, at, page) => page.turn % 2, span: [0, 1], scale: 'flag', unit: 'every other turn'},
};
export const offered = (pages) => Object.keys(COLOURS).filter((name) => COLOURS[name].columns.every((column) => pages.some((page) => page.tokens[column])));

/** A class of the style sheet: steps from pale to strong, of one colour or of two. */
export function shade(value, {span: [least, most], scale}) {
  if (value === null) return '';
  const share = Math.max(0, Math.min(1, (value - least) / (most - least)));
  if (scale === 'flag') return share > 0.5 ? 'f1' : '';
  if (scale === 'both') {
    const side = Math.round(Math.abs(share - 0.5) * 16);
    return side ? `${share < 0.5 ? 'n' : 'p'}${side}` : '';
  }
  const step = Math.round((1 - share) * 8);
  return step ? `n${step}` : '';
}

/** Places of the tokens that stand out: the least likely, or those with the largest difference. */
export function outliers(pages, name) {
  const {of, span, scale} = COLOURS[name];
  const bound = scale === 'low' ? span[0] / 2 : span[1] / 2;
  const found = [];
  for (const page of pages) {
    for (let at = 0; at < rowsOf(page.tokens); at += 1) {
      const value = of(page.tokens, at, page);
      if (value === null || scale === 'flag') continue;
      if (scale === 'low' ? value < bound : Math.abs(value) > bound) found.push({page, at});
    }
  }
  return found;
}
