// The search: every answer that was proposed, what it was held to be worth, and the way that was acted on.
import {useLayoutEffect, useMemo, useRef, useState} from 'preact/hooks';
import {html} from 'studio/base/html';
import {Shown} from 'studio/base/text';
import {useBody} from 'studio/base/episode';
import {count, fixed, known, plural} from 'studio/base/format';
import {useKeys} from 'studio/base/keys';
import {around, laidOut} from 'studio/base/layout';
import {Body} from 'studio/parts/message';
import {Empty} from 'studio/parts/states';

export function Tree({model, node: chosen, choose, store}) {
  const [opened, set] = useState(new Set());
  const [all, openAll] = useState(false);
  const open = useMemo(() => openFor(model, opened, all, chosen), [model, opened, all, chosen]);
  const toggle = (at) => set(opened.has(at) ? new Set([...opened].filter((each) => each !== at)) : new Set([...opened, at]));
  const [zoom, scale] = useState(1);
  const drawn = useMemo(() => laidOut(model, open), [model, open]);
  const node = useMemo(() => nearest(model, drawn, chosen), [drawn, chosen]);
  const place = useRef(null);
  const values = model.nodes.value ?? [];
  const bounds = useMemo(() => boundsOf(values), [values]);
  const steps = useMemo(() => around(model, node), [model, node]);
  useKeys('Tree', {
    ArrowRight: ['first answer below', () => choose(steps.children.find((each) => model.of('acted')(each)) ?? steps.children[0])],
    ArrowLeft: ['the answer above', () => choose(steps.parent)],
    ArrowDown: ['next answer beside', () => beside(1)], ArrowUp: ['previous answer beside', () => beside(-1)],
    ']': ['', () => beside(1)], '[': ['', () => beside(-1)],
    '+': ['larger', () => scale((now) => Math.min(2, now * 1.25))], '-': ['smaller', () => scale((now) => Math.max(0.3, now / 1.25))],
    0: ['as it was', () => scale(1)], Enter: ['open or close what is below', () => node !== null && toggle(node)],
    e: ['open or close everything', () => openAll(!all)],
  });
  const beside = (by) => {
    const all = steps.parent === null ? [] : around(model, steps.parent).children;
    if (all.length) choose(all[(all.indexOf(node) + by + all.length) % all.length]);
  };
  useLayoutEffect(() => {
    const point = drawn.points.find((each) => each.node === (node ?? drawn.points[0]?.node));
    if (!point) return;
    const {clientWidth, clientHeight, scrollLeft, scrollTop} = place.current;
    const [x, y] = [point.x * zoom, point.y * zoom];
    if (x < scrollLeft + 60 || x > scrollLeft + clientWidth - 160) place.current.scrollLeft = x - clientWidth / 3;
    if (y < scrollTop + 40 || y > scrollTop + clientHeight - 40) place.current.scrollTop = y - clientHeight / 2;
  }, [node, zoom, drawn]);
  if (!model.answers.length && !drawn.points.length) return html`<${Empty} title="No tree">Nothing was sampled in this episode.</${Empty}>`;
  return html`<div class="tree">
    <p class="strip legend"><${Legend} bounds=${bounds} model=${model} /><span class="grow"></span>
      ${model.total > drawn.points.length && html`<button aria-pressed=${all ? 'true' : 'false'} onClick=${() => openAll(!all)}>All answers</button>`}
      <span class="group"><button class="icon" aria-label="Smaller" onClick=${() => scale(Math.max(0.3, zoom / 1.25))}>−</button>
      <button class="icon" aria-label="Larger" onClick=${() => scale(Math.min(2, zoom * 1.25))}>+</button></span></p>
    <div class="canvas" ref=${place} tabindex="0" role="group" aria-label="Search tree; arrows move along it">
      <svg width=${drawn.width * zoom} height=${drawn.height * zoom} viewBox=${`0 0 ${drawn.width} ${drawn.height}`} role="img" aria-label=${`${plural(drawn.points.length, 'answer')} drawn of ${count(model.total)} nodes`}
        onClick=${(event) => pick(event, choose, toggle)}>
        <g class="links">${drawn.points.map((each) => each.from && html`<path key=${key(each)} class=${kindOf(model, each)} d=${curve(each)} />`)}</g>
        <g>${drawn.points.map((each) => html`<${Point} key=${key(each)} model=${model} point=${each} bounds=${bounds} here=${each.node !== null && each.node === node} />`)}</g>
      </svg>
    </div>
    ${chosen !== null && html`<${Branch} model=${model} at=${chosen} store=${store} choose=${choose} />`}
  </div>`;
}

/** The answer that stands for a node: what an environment said belongs to the answer above. */
function nearest(model, drawn, chosen) {
  const there = new Set(drawn.points.map((each) => each.node));
  let at = chosen;
  while (at !== null && !there.has(at)) at = model.of('parent')(at);
  return at;
}

const key = (point) => (point.node === null ? `s${point.parent}` : point.node);

/** What is open: what the user opened, and all above the node that is selected. */
function openFor(model, opened, all, chosen) {
  const open = new Set(opened);
  for (let at = chosen === null ? null : model.of('parent')(chosen); at !== null; at = model.of('parent')(at)) open.add(at);
  open.all = all;
  return open;
}

function pick(event, choose, unfold) {
  const {node, stack} = event.target.closest('[data-node], [data-stack]')?.dataset ?? {};
  if (node !== undefined) {
    choose(Number(node));
    if (event.target.closest('.closed')) unfold(Number(node));
  } else if (stack !== undefined) unfold(Number(stack));
}

const curve = ({x, y, from}) => `M${from.x} ${from.y}C${(from.x + x) / 2} ${from.y} ${(from.x + x) / 2} ${y} ${x} ${y}`;

function kindOf(model, point) {
  const at = point.node;
  if (at === null) return 'dropped';
  return [point.acted && 'acted', model.of('simulated')(at) && 'simulated', model.of('dropped')(at) && 'dropped'].filter(Boolean).join(' ');
}

export function boundsOf(values) {
  let least = Infinity;
  let most = -Infinity;
  for (const value of values) {
    if (!known(value)) continue;
    least = Math.min(least, value);
    most = Math.max(most, value);
  }
  return most === -Infinity ? null : most > least ? [least, most] : [least - 0.5, most + 0.5];
}

/** One of nine steps between the least and the largest value. */
export const stepOf = (value, bounds) => (known(value) && bounds ? Math.min(8, Math.floor(((value - bounds[0]) / (bounds[1] - bounds[0])) * 9)) : null);

function Point({model, point, bounds, here}) {
  const {node, stack, hidden, x, y} = point;
  if (node === null) {
    return html`<g class="point stack" data-stack=${point.parent} transform=${`translate(${x} ${y})`}><rect x="-7" y="-7" width="14" height="14" rx="3" /><text x="14" y="4">${stack.length} more</text></g>`;
  }
  const {of} = model;
  const visits = of('visits')(node) ?? 0;
  const value = of('value')(node);
  const radius = Math.min(9, 3.5 + Math.sqrt(visits) * 0.75);
  const step = stepOf(value, bounds);
  const words = [value !== null && fixed(value), visits > 1 && `×${visits}`, hidden > 0 && `+${hidden}`].filter(Boolean).join(' ');
  return html`<g class=${`point ${kindOf(model, point)}${here ? ' here' : ''}${hidden ? ' closed' : ''}`} data-node=${node} transform=${`translate(${x} ${y})`}>
    <circle class="hit" r="11" /><circle class=${step === null ? 'none' : `v${step}`} r=${radius} />
    ${(point.acted || here || hidden > 0 || visits > 3) && html`<text x=${point.acted ? 4 : 13} y=${point.acted ? -12 : 4}>${words || (of('calls')(node)?.[0] ?? '')}</text>`}
    <title>${[`node ${node}`, words, of('dropped')(node), of('text')(node)].filter(Boolean).join('\n')}</title></g>`;
}

function Legend({bounds, model}) {
  const dropped = (model.nodes.dropped ?? []).filter(Boolean).length;
  return html`${bounds && html`<span class="swatches" aria-hidden="true">${Array.from({length: 9}, (_, n) => html`<i key=${n} class=${`v${n}`}></i>`)}</span><span>value ${fixed(bounds[0])} to ${fixed(bounds[1])}</span>`}
    <span><i class="stroke acted"></i> acted</span>
    ${model.nodes.simulated && html`<span><i class="stroke simulated"></i> simulated</span>`}
    ${dropped > 0 && html`<span><i class="stroke dropped"></i> ${count(dropped)} dropped</span>`}`;
}

/** The way to a node, and what it says. */
function Branch({model, at, store}) {
  const body = useBody(model, at, store);
  const why = model.of('dropped')(at);
  const bill = model.of('search')(at);
  return html`<section class="branch" aria-label=${`Node ${at}`}>
    <header><b>Node ${at}</b>${known(model.of('value')(at)) && html`<span>value ${fixed(model.of('value')(at), 3)}</span>`}
      ${known(model.of('visits')(at)) && html`<span>${plural(model.of('visits')(at), 'visit')}</span>`}
      ${why && html`<span class="bad">dropped: <${Shown} text=${why} /></span>`}
      ${bill && html`<span class="muted">${Object.entries(bill).filter(([, value]) => typeof value !== 'object').map(([name, value]) => `${name.replaceAll('_', ' ')} ${value}`).join(' · ')}</span>`}</header>
    <${Body} body=${body} excerpt=${model.of('text')(at)} kind="said" place=${{id: model.header.id, node: at, store}} />
  </section>`;
}
