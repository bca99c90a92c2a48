// Where the nodes of a search tree are drawn: tidy, from left to right, with long rows of siblings as one stack.
import {hierarchy, tree} from 'd3-hierarchy';

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

/** The answers below a node; what an environment said in between is part of the way to them. The one that was acted on
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
