// The views of an episode. They share one selected node, which is in the address.
import {useEffect, useLayoutEffect, useMemo, useRef, useState} from 'preact/hooks';
import {Shown, cell, count, exported, fixed, html, known, param, plain, plural, put, query, reward, rowsOf, useAnswer, useKeys} from 'studio/base';
import {COLOURS, PAGE, around, labelsAt, laidOut, offered, outliers, sampledIn, shade, spanOf, spanText, tokensOf, useBody} from 'studio/model';
import {Body, Empty, Problem, Waiting, Windowed, toRemark} from 'studio/parts';
export function Conversation({model, node, choose, store}) {
  const at = model.items.findIndex((item) => item.node === node || item.answers.includes(node));
  if (!model.items.length) return html`<${Empty} title="No messages">The episode has no messages${model.header.failure ? '; it failed before the first one' : ' yet'}.</${Empty}>`;
  return html`<div class="conversation" role="region" aria-label="Conversation">
    <${Windowed} items=${model.items} guess=${180} at=${at}>${(item, number) => html`
      <${Item} key=${item.node} model=${model} item=${item} here=${number === at} choose=${choose} store=${store} />`}</${Windowed}>
  </div>`;
}
const ROLES = {system: 'System', user: 'User', assistant: 'Model', tool: 'Result'};

function Item({model, item, here, choose, store}) {
  const {of} = model;
  const at = item.node;
  const place = useRef(null);
  const near = useNear(place);
  const body = useBody(model, at, store, near);
  useLayoutEffect(() => { if (here) place.current.scrollIntoView({block: 'nearest'}); }, [here]);
  const role = of('role')(at);
  const calls = of('calls')(at);
  return html`
    ${item.begins && html`<div class="segment"><b>Segment ${item.segment}</b> <span><${Shown} text=${of('cause')(at) ?? 'the prompt does not extend the turn before'} /></span></div>`}
    <article ref=${place} class=${`item ${role}${here ? ' here' : ''}`} id=${`node-${at}`} aria-label=${`${ROLES[role]} ${of('turn')(at) ?? ''}`} aria-current=${here ? 'true' : null} onClick=${() => choose(at)}>
      <div class="side"><b>${of('kind')(at) ?? ROLES[role]}</b>${of('turn')(at) !== null && role === 'assistant' && html`<span>turn ${of('turn')(at)}</span>`}</div>
      <div class="main">
        <${Body} body=${body} excerpt=${of('text')(at)} kind=${role === 'assistant' ? 'sampled' : ''} place=${{id: model.header.id, node: at, store}} />
        ${item.answers.map((answer) => html`<${Result} key=${answer} model=${model} at=${answer} near=${near} store=${store} />`)}
        ${role === 'assistant' && html`<${Figures} of=${of} at=${at} siblings=${model.children[of('parent')(at)]?.length ?? 1} calls=${calls} />`}
      </div>
    </article>`;
}

function Result({model, at, near, store}) {
  const body = useBody(model, at, store, near);
  return html`<div class="result" id=${`node-${at}`}><span class="sr">Result</span><${Body} body=${body} excerpt=${model.of('text')(at)} kind="code" place=${{id: model.header.id, node: at, store}} /></div>`;
}

function Figures({of, at, siblings}) {
  const paid = of('reward')(at);
  const parts = [
    paid !== null && html`<span class=${paid > 0 ? 'good' : ''}>reward ${reward(paid)}${of('simulated')(at) ? ' (fork)' : ''}</span>`,
    of('sampled_tokens')(at) !== null && html`<span>${count(of('sampled_tokens')(at))} tokens</span>`,
    of('logprob')(at) !== null && html`<span title="mean logprob of the sampled tokens, in nats">logprob ${fixed(of('logprob')(at))}</span>`,
    of('value')(at) !== null && html`<span>value ${fixed(of('value')(at))}</span>`,
    siblings > 1 && html`<span>1 of ${siblings} answers</span>`,
    of('policy')(at) && html`<span>by <${Shown} text=${of('policy')(at)} /></span>`,
    of('finish')(at) === 'length' && html`<span class="bad">cut at the length limit</span>`,
    of('lacks')(at) && html`<span class="bad" title=${of('lacks')(at).join('; ')}>not trainable</span>`,
  ].filter(Boolean);
  return parts.length ? html`<div class="figures">${parts}</div>` : null;
}

/** Whether something is or was near the view. */
function useNear(place) {
  const [near, set] = useState(false);
  useEffect(() => {
    if (near) return undefined;
    const watch = new IntersectionObserver((seen) => seen.at(-1).isIntersecting && set(true), {rootMargin: '600px 0px'});
    watch.observe(place.current);
    return () => watch.disconnect();
  }, [near]);
  return near;
}

export function Tokens({model, node, choose, store}) {
  const start = node !== null && model.of('sampled')(node) ? node : model.answers.find((each) => each >= (node ?? 0)) ?? model.answers.at(-1) ?? null;
  const stream = useStream(model, start, store);
  const {error, next} = stream;
  const group = useGroup(model.header, store, param('colour') === 'advantage');
  const pages = useMemo(() => (group.advantage === null ? stream.pages : stream.pages.map((page) => ({...page, advantage: group.advantage}))), [stream.pages, group.advantage]);
  const [hover, point] = useState(null);
  const place = useRef(null);
  const names = useMemo(() => offered(pages), [pages]);
  const colour = names.includes(param('colour')) ? param('colour') : names[0] ?? 'mask';
  const marked = param('tokens');
  const span = spanOf(marked);
  const labels = useMemo(() => model.header.labels.filter((each) => each.tokens), [model]);
  const lengthen = (by) => {
    const total = span && pages.find((page) => page.node === span.node)?.total;
    if (total) put({tokens: spanText({...span, last: Math.min(Math.max(span.first, span.last + by), total - 1)})});
  };
  const found = useMemo(() => outliers(pages, colour), [pages, colour]);
  const jump = (by) => {
    if (!found.length) return;
    const now = found.findIndex(({page, at}) => name(page, at) === marked);
    const to = found[(now < 0 ? (by > 0 ? 0 : found.length - 1) : now + by + found.length) % found.length];
    put({tokens: name(to.page, to.at)});
  };
  useKeys('Tokens', {
    n: ['next outlier', () => jump(1)], N: ['previous outlier', () => jump(-1)],
    '>': ['select one token more', () => lengthen(1)], '<': ['select one token less', () => lengthen(-1)],
    v: ['next colour', () => put({colour: names[(names.indexOf(colour) + 1) % names.length]})],
  });
  useEffect(() => {
    for (const token of place.current?.querySelectorAll('.t.at') ?? []) token.classList.remove('at', 'part');
    const last = Math.min(span?.last, pages.find((page) => page.node === span?.node)?.total ?? -1);
    let token = null;
    for (let at = span?.first; at <= last; at += 1) {
      token = place.current?.querySelector(`[data-t="${span.node}.${at}"]`) ?? token;
      token?.classList.add('at', ...(span.last > span.first ? ['part'] : []));
    }
    token?.scrollIntoView({block: 'nearest'});
    if (token) point(token.dataset.t);
  }, [marked, pages, colour, labels]);
  if (start === null) return html`<${Empty} title="No tokens">Nothing was sampled in this episode.</${Empty}>`;
  if (error) return html`<${Problem} error=${error} />`;
  if (!pages.length) return html`<${Waiting} rows=${8} />`;
  if (pages.every((page) => !page.total)) {
    const why = (model.of('lacks')(start) ?? []).join('; ');
    return html`<${Empty} title="No token ids were recorded">${why || 'The server that answered sends none. vLLM does with return_token_ids, and so does openhands-rl serve.'}</${Empty}>`;
  }
  return html`<div class="tokens">
    <div class="strip"><span class="group" role="group" aria-label="Colour by">${names.map((each) => html`<button key=${each} aria-pressed=${each === colour ? 'true' : 'false'} onClick=${() => put({colour: each})}>${COLOURS[each].name}</button>`)}</span>
      <span class="muted">${COLOURS[colour].scale === 'flag' ? COLOURS[colour].unit : `${COLOURS[colour].span.map((each) => fixed(each, 0)).join(' to ')} ${COLOURS[colour].unit}`}</span>
      <span class="grow"></span>${COLOURS[colour].scale !== 'flag' && html`<button disabled=${!found.length} onClick=${() => jump(1)}>${plural(found.length, 'outlier')}</button>`}</div>
    ${group.note && html`<p class="note">${group.note}</p>`}
    ${pages[0].tokenizer && !pages.some((page) => page.tokens.text) && html`<p class="note">Ids are shown: ${pages[0].tokenizer}.</p>`}
    <${Hover} pages=${pages} name=${hover} labels=${labels} chosen=${sampledIn(span, model)} />
    <div class="stream" ref=${place} onPointerOver=${(event) => event.target.dataset?.t && point(event.target.dataset.t)}
      onClick=${(event) => { const chosen = chosenBy(event, span); if (chosen) put({tokens: spanText(chosen)}); }}>
      ${pages.map((page) => html`<${Page} key=${`${page.node}-${page.from}`} page=${page} colour=${colour} labels=${labels} turn=${model.of('turn')(page.node)} choose=${choose} />`)}
    </div>
    ${next && html`<p class="strip"><button onClick=${next}>More tokens</button></p>`}
  </div>`;
}

/** A token that was clicked; with shift, or after drawing over a text, all of the same turn in between. */
function chosenBy(event, span) {
  const drawn = getSelection();
  const ends = [drawn.anchorNode, drawn.focusNode].map((each) => spanOf(each?.parentElement?.closest('[data-t]')?.dataset.t));
  const clicked = spanOf(event.target.dataset?.t);
  const [one, other] = event.shiftKey && span && clicked ? [span, clicked] : drawn.isCollapsed ? [clicked, clicked] : ends;
  if (!one || one.node !== other?.node) return clicked;
  return {node: one.node, first: Math.min(one.first, other.first), last: Math.max(one.last, other.last)};
}
const name = (page, at) => `${page.node}.${page.from + at}`;

/** The advantage of the whole episode, from the rewards of its group. */
function useGroup(header, store, wanted) {
  const answer = useAnswer(wanted && !exported ? `groups/${header.group.split('/').map(encodeURIComponent).join('/')}${query({store})}` : null, {keep: false});
  if (!wanted) return {advantage: null, note: null};
  if (!answer.data) return {advantage: null, note: answer.error || exported ? 'The group is not there to count the advantage from.' : null};
  const at = (answer.data.samples.id ?? []).indexOf(header.id);
  const advantage = at < 0 ? null : cell(answer.data.samples, 'advantage', at);
  return {advantage, note: advantage === null ? 'The advantage is not known: the episode failed, or nobody has judged its group.' : `${fixed(advantage, 3)} is GRPO’s advantage of the episode, from the rewards of its group as they are now.`};
}

/** Pages from a turn on, along what was acted on, until there are as many tokens as fit. */
function useStream(model, start, store) {
  const [state, set] = useState({pages: [], error: null, rest: null});
  const {id} = model.header;
  const grow = async (pages, rest, wanted) => {
    let size = 0;
    const added = [];
    while (rest && size < PAGE && wanted()) {
      const page = await tokensOf(id, rest.node, rest.from, store);
      const follows = model.answers[model.answers.indexOf(rest.node) + 1];
      added.push({...page, turn: model.of('turn')(rest.node) ?? 0});
      size += rowsOf(page.tokens);
      rest = page.next !== null ? {node: rest.node, from: page.next} : follows === undefined ? null : {node: follows, from: 0};
    }
    if (wanted()) set({pages: [...pages, ...added], rest, error: null});
  };
  useLayoutEffect(() => {
    let here = true;
    if (start !== null) grow([], {node: start, from: 0}, () => here).catch((error) => here && set({pages: [], rest: null, error}));
    return () => { here = false; };
  }, [id, start, store]);
  const next = state.rest && (() => grow(state.pages, state.rest, () => true).catch((error) => set({...state, error})));
  return {...state, next};
}

/** Thousands of tokens are made by hand, as text only, and are coloured anew without being made anew. */
function Page({page, colour, labels, turn, choose}) {
  const place = useRef(null);
  const {tokens, prompt, from} = page;
  const size = rowsOf(tokens);
  useLayoutEffect(() => {
    const made = document.createDocumentFragment();
    for (let at = 0; at < size; at += 1) {
      const text = cell(tokens, 'text', at);
      const token = document.createElement('span');
      token.dataset.t = name(page, at);
      token.textContent = text === null ? `${tokens.id[at]} ` : seen(text);
      made.append(token);
    }
    place.current.replaceChildren(made);
  }, [page]);
  useLayoutEffect(() => {
    const measure = COLOURS[colour];
    const own = labels.filter((each) => each.node === page.node);
    for (let at = 0; at < size; at += 1) {
      place.current.children[at].className = `t${from + at < prompt ? ' prompt' : ''} ${shade(measure.of(tokens, at, page), measure)}${labelsAt(own, page, at).length ? ' noted' : ''}`;
    }
  }, [page, colour, labels]);
  return html`<section class="turn"><h2 class="small"><button class="plain" onClick=${() => choose(page.node)}>Turn ${turn ?? '–'}</button>
    <span>${plural(prompt, 'prompt token')} ${page.extends ? 'new' : 'in full'}, ${count(page.total - prompt)} sampled</span></h2><p class="sampled" ref=${place}></p></section>`;
}
/** A line feed has no width of its own, and a colour needs one. */
const seen = (text) => plain(text).replaceAll('\n', '⏎\n').replaceAll('\t', '⇥\t') || '·';

function Hover({pages, name: wanted, labels, chosen}) {
  const [node, place] = (wanted ?? '').split('.').map(Number);
  const page = pages.find((each) => each.node === node && place >= each.from && place < each.from + rowsOf(each.tokens));
  if (!page) return html`<p class="hover muted">Point at a token, or press n.</p>`;
  const at = place - page.from;
  const of = (column) => cell(page.tokens, column, at);
  const server = of('logprob');
  return html`<p class="hover"><code>${seen(of('text') ?? '')}</code>
    <span>id ${of('id')}</span><span>${place < page.prompt ? 'prompt' : 'sampled'}</span>
    ${known(server) && html`<span>logprob ${fixed(server, 4)} <span class="muted">p ${fixed(Math.exp(server), 3)}</span></span>`}
    ${known(COLOURS.advantage.of(page.tokens, at, page)) && html`<span>advantage ${fixed(COLOURS.advantage.of(page.tokens, at, page), 3)}</span>`}
    ${labelsAt(labels, page, at).map((each) => html`<span key=${each.id} class="remark">“<${Shown} text=${each.text} most=${300} />” <small class="muted"><${Shown} text=${each.author} most=${60} /></small></span>`)}
    ${chosen && !exported && html`<button class="plain" onClick=${toRemark}>comment on ${plural(chosen.tokens[1] - chosen.tokens[0], 'token')}</button>`}</p>`;
}

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

/** The answer that stands for a node: an observation belongs to the answer above. */
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
    <${Body} body=${body} excerpt=${model.of('text')(at)} kind="sampled" place=${{id: model.header.id, node: at, store}} />
  </section>`;
}
export const VIEWS = {
  conversation: {name: 'Conversation', key: 'c', component: Conversation},
  tree: {name: 'Tree', key: 't', component: Tree},
  tokens: {name: 'Tokens', key: 'o', component: Tokens},
};
