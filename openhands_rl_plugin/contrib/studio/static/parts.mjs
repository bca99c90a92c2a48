// Parts of pages.
import {signal} from '@preact/signals';
import {useEffect, useLayoutEffect, useMemo, useRef, useState} from 'preact/hooks';
import {PAGE, Shown, colour, count, exported, fixed, help, html, label, link, listing, mark, moment, param, percent, plural, policy, put, query, repaint, reward, seconds, short, useAnswer, useKeys, useLive, when, words as labelWords} from 'studio/base';
import data from 'studio/data';
import {diff, hunks, modelOf, more, sampledIn, spanOf, spanText, useBody} from 'studio/model';
export const Empty = ({title, children}) => html`<section class="empty"><h2>${title}</h2>${children && html`<div>${children}</div>`}</section>`;

/** An error with its cause; the server's messages name the remedy. */
export const Problem = ({error, again}) => html`<section class="problem" role="alert">
  <p><${Shown} text=${error.message} /></p>${again && html`<button onClick=${again}>Try again</button>`}</section>`;

/** The place that the content will take, so that nothing moves when it comes. */
export const Waiting = ({rows = 6}) => html`<div class="waiting" aria-busy="true" aria-label="Loading">
  ${Array.from({length: rows}, (_, at) => html`<div key=${at} class=${`bone w${at % 3}`}></div>`)}</div>`;

/** `answer` of `useAnswer`: the children get its data when it is there. */
export function Answer({answer, rows, children}) {
  if (answer.error && !answer.data) return html`<${Problem} error=${answer.error} again=${answer.again} />`;
  if (!answer.data) return html`<${Waiting} rows=${rows} />`;
  return html`${answer.error && html`<${Problem} error=${answer.error} again=${answer.again} />`}${children(answer.data)}`;
}

/** Terms with their values; what is unknown is left out. */
export const Facts = ({rows}) => html`<dl class="facts">${rows.filter(([, value]) => value !== null && value !== undefined && value !== '')
  .map(([name, value, hint]) => html`<div key=${name} title=${hint} class=${typeof value === 'string' && value.length > 60 ? 'long' : null}><dt>${name}</dt><dd>${typeof value === 'string' ? html`<${Shown} text=${value} />` : value}</dd></div>`)}</dl>`;

/** What a file of bounded size had no room for. */
export const LeftOut = () => (data?.export.left_out?.length ? html`<p class="muted">Left out, so that this file stays small: <${Shown} text=${data.export.left_out.join('; ')} />.</p>` : null);
export const helpShown = signal(false);
/** What the studio says in its lower corner; screen readers read it too. */
export const notice = signal('');

/** A dialog that is on the page while `open`; Escape closes it. */
export function Dialog({open, close, label, children}) {
  const place = useRef(null);
  useEffect(() => {
    if (open && !place.current.open) place.current.showModal();
    else if (!open && place.current?.open) place.current.close();
  }, [open]);
  return html`<dialog ref=${place} aria-label=${label} onClose=${close} onClick=${(event) => event.target === place.current && close()}>
    ${open && html`<div class="dialog"><header><h2>${label}</h2><button class="icon" aria-label="Close" onClick=${close}>×</button></header>${children}</div>`}
  </dialog>`;
}
const NAMES = {ArrowUp: '↑', ArrowDown: '↓', ArrowLeft: '←', ArrowRight: '→', Escape: 'Esc', Enter: '↵', ' ': 'space'};

export function Help() {
  return html`<${Dialog} open=${helpShown.value} close=${() => { helpShown.value = false; }} label="Keys">
    <div class="keys">${help().map(([section, rows]) => html`<section key=${section}><h3>${section}</h3>
      <dl>${rows.map(([key, what]) => html`<div key=${key}><dt>${key.split(' ').filter(Boolean).map((each) => html`<kbd>${NAMES[each] ?? each}</kbd>`)}${key === ' ' && html`<kbd>space</kbd>`}</dt><dd>${what}</dd></div>`)}</dl></section>`)}</div>
  </${Dialog}>`;
}
const BLOCK = 20;

/** `children(item, number)`; `guess`: pixels of an item that was never drawn. `at`: the item that must be drawn. */
export function Windowed({items, guess, at = null, children}) {
  const blocks = Array.from({length: Math.ceil(items.length / BLOCK)}, (_, number) => number);
  const wanted = at === null || at < 0 ? 0 : Math.floor(at / BLOCK);
  return blocks.map((number) => html`<${Block} key=${number} first=${number * BLOCK} items=${items.slice(number * BLOCK, (number + 1) * BLOCK)}
    guess=${guess} keep=${Math.abs(number - wanted) <= 0} draw=${children} />`);
}

function Block({first, items, guess, keep, draw}) {
  const place = useRef(null);
  const height = useRef(items.length * guess);
  const [near, set] = useState(first === 0);
  useEffect(() => {
    const watch = new IntersectionObserver((seen) => set(seen.at(-1).isIntersecting), {rootMargin: '1200px 0px'});
    watch.observe(place.current);
    return () => watch.disconnect();
  }, []);
  const shown = near || keep;
  useLayoutEffect(() => { if (shown) height.current = place.current.offsetHeight; });
  return html`<div ref=${place} style=${shown ? {} : {height: `${height.current}px`}}>${shown && items.map((item, at) => draw(item, first + at))}</div>`;
}
const SPARE = 12;

/** `children(number)` draws a row, with `more` columns than usual. `shown(first, last)` hears what is in view. `at`: the row that must be in view. */
export function Rows({total, height, at = null, shown, label, head, more = 0, children}) {
  const place = useRef(null);
  const [view, set] = useState({top: 0, size: 600});
  const look = () => place.current && set({top: place.current.scrollTop, size: place.current.clientHeight});
  useEffect(() => {
    const watch = new ResizeObserver(look);
    watch.observe(place.current);
    return () => watch.disconnect();
  }, []);
  useLayoutEffect(() => {
    if (at === null) return;
    const {scrollTop, clientHeight} = place.current;
    const from = at * height;
    if (from < scrollTop) place.current.scrollTop = from;
    else if (from + height > scrollTop + clientHeight) place.current.scrollTop = from + height - clientHeight;
  }, [at, view.size]);
  const first = Math.max(0, Math.floor(view.top / height) - SPARE);
  const last = Math.min(total, Math.ceil((view.top + view.size) / height) + SPARE);
  useLayoutEffect(() => { shown?.(first, last); }, [first, last, total]);
  return html`<div class=${`table more${more}`} role="table" aria-label=${label} aria-rowcount=${total}>
    ${head}
    <div class="scroll" ref=${place} onScroll=${look} tabindex="0" role="rowgroup">
      <div class="tall" role="presentation" style=${{height: `${total * height}px`}}>
        ${Array.from({length: Math.max(0, last - first)}, (_, n) => children(first + n, {transform: `translateY(${(first + n) * height}px)`, height: `${height}px`}))}
      </div>
    </div>
  </div>`;
}
const [TREND_HEIGHT, LEFT, RIGHT, TOP] = [200, 52, 12, 12];
const LEAST = 16;

/** `slots`: names along the axis. `series`: `[{name, kind, points: [{slot, value, low, high}]}]`, of kinds `main`, `other` and `dashed`. */
export function Trend({label, slots, series}) {
  const place = useRef(null);
  const [width, set] = useState(0);
  useLayoutEffect(() => {
    const look = () => place.current && set(place.current.clientWidth);
    const watch = new ResizeObserver(look);
    watch.observe(place.current);
    look();
    return () => watch.disconnect();
  }, []);
  const drawn = series.filter((each) => each.points.length);
  return html`<figure class="trend"><figcaption class="line">${drawn.map((each) => html`<span key=${each.name} class=${`key ${each.kind}`}><svg viewBox="0 0 24 12" aria-hidden="true"><line x1="0" x2="24" y1="6" y2="6" /><circle cx="12" cy="6" r="3.5" /></svg>${each.name}</span>`)}</figcaption>
    <div ref=${place}>${width > 0 && html`<${Drawn} label=${label} slots=${slots} series=${drawn} width=${width} />`}</div></figure>`;
}

function Drawn({label, slots, series, width}) {
  const values = series.flatMap((each) => each.points.flatMap(({value, low, high}) => [value, low ?? value, high ?? value]));
  const [least, most] = [Math.min(0, ...values), Math.max(1, ...values)];
  const step = (width - LEFT - RIGHT) / Math.max(slots.length, 1);
  const every = Math.ceil(LEAST / step);
  // Names that do not fit beside each other stand in two lines, or are turned.
  const wide = (lines) => Math.max(0, ...lines.flat().map((each) => each.length)) * 6.2;
  const halves = slots.map((each) => (each.includes('-') ? [each.slice(0, each.indexOf('-') + 1), each.slice(each.indexOf('-') + 1)] : [each]));
  const fits = (lines) => wide(lines) + 8 <= step * every;
  const turned = !fits(slots) && !fits(halves);
  const lines = fits(slots) || turned ? slots.map((each) => [each.length > 21 ? `${each.slice(0, 20)}…` : each]) : halves;
  const below = turned ? Math.min(wide(slots), 130) * 0.87 + 16 : 10 + 14 * Math.max(1, ...lines.map((each) => each.length));
  const x = (slot) => LEFT + step * (slot + 0.5);
  const y = (value) => TOP + (TREND_HEIGHT - TOP) * (1 - (value - least) / (most - least));
  const ticks = Array.from({length: 6}, (_, at) => least + ((most - least) * at) / 5);
  const listed = series.map((each) => `${each.name}: ${each.points.map(({slot, value}) => `${slots[slot]} ${fixed(value)}`).join(', ')}`).join('; ');
  return html`<svg width=${width} height=${TREND_HEIGHT + below} role="img" aria-label=${`${label}. ${listed}`}>
    ${ticks.map((tick) => html`<g key=${tick} class="tick"><line x1=${LEFT} x2=${width - RIGHT} y1=${y(tick)} y2=${y(tick)} /><text x=${LEFT - 8} y=${y(tick) + 4} text-anchor="end">${figure(tick)}</text></g>`)}
    ${slots.map((_, slot) => slot % every === 0 && html`<text key=${slot} class="slot" text-anchor=${turned ? 'end' : 'middle'} transform=${`translate(${x(slot) + (turned ? 4 : 0)} ${TREND_HEIGHT + 16})${turned ? ' rotate(-60)' : ''}`}>${lines[slot].map((each, at) => html`<tspan key=${at} x="0" dy=${at ? 14 : 0}>${each}</tspan>`)}</text>`)}
    ${series.map((each) => html`<g key=${each.name} class=${`series ${each.kind}`}>
      <polyline points=${each.points.map(({slot, value}) => `${x(slot)},${y(value)}`).join(' ')} />
      ${each.points.map(({slot, value, low, high}) => html`<g key=${slot}>${low !== null && low !== undefined && html`<line class="spread" x1=${x(slot)} x2=${x(slot)} y1=${y(low)} y2=${y(high)} />`}
        <circle cx=${x(slot)} cy=${y(value)} r="3.5"><title>${`${each.name}, ${slots[slot]}: ${fixed(value, 3)}${low === null || low === undefined ? '' : ` (${fixed(low, 3)} to ${fixed(high, 3)})`}`}</title></circle></g>`)}
    </g>`)}</svg>`;
}
const CHART_HEIGHT = 132;
const figure = (value) => (value === null || value === undefined ? '–' : Math.abs(value) >= 1000 ? short(value) : Math.abs(value) > 0 && Math.abs(value) < 0.01 ? value.toExponential(1) : fixed(value, 3));
/** `iteration-007` -> `7`, where the names would not fit. */
const brief = (name) => name.replace(/^iteration-0*(?=\d)/, '').slice(0, 10);

/** `names`: of the points, where they are not steps. */
export function Curve({name, x, y, names}) {
  const place = useRef(null);
  const chart = useRef(null);
  const [at, point] = useState(null);
  const painted = repaint.value;
  const known = y.filter((each) => each !== null);
  useEffect(() => {
    let here = true;
    import('uplot').then(({default: UPlot}) => {
      if (!here || !place.current) return;
      const [line, grid, words] = [colour('--accent'), colour('--line'), colour('--muted')];
      const axis = {stroke: words, grid: {stroke: grid, width: 1}, ticks: {show: false}, font: '11px system-ui', size: 24, gap: 4};
      chart.current = new UPlot({
        width: place.current.clientWidth, height: CHART_HEIGHT, legend: {show: false}, padding: [8, 8, 0, 0],
        cursor: {y: false, points: {size: 6}}, scales: {x: {time: false}},
        hooks: {setCursor: [(plot) => point(plot.cursor.idx)]},
        axes: [names ? {...axis, splits: () => x.filter((_, at) => at % Math.ceil(x.length / 8) === 0), values: (_, splits) => splits.map((each) => brief(names[each] ?? ''))} : {...axis, values: (_, splits) => splits.map((each) => (Number.isInteger(each) ? short(each) : ''))}, {...axis, size: 56, values: (_, splits) => splits.map(figure)}],
        series: [{}, {stroke: line, width: 1.5, spanGaps: true, points: {show: known.length < 2 || Boolean(names)}}],
      }, [x, y], place.current);
    }, () => {});
    const watch = new ResizeObserver(() => chart.current?.setSize({width: place.current.clientWidth, height: CHART_HEIGHT}));
    watch.observe(place.current);
    return () => {
      here = false;
      watch.disconnect();
      chart.current?.destroy();
      chart.current = null;
    };
  }, [painted]);
  useEffect(() => { chart.current?.setData([x, y]); }, [x, y]);
  const shown = at === null ? known.at(-1) : y[at];
  return html`<figure class="curve"><figcaption><b>${name}</b><span>${figure(shown)}${at !== null ? html` <span class="muted">at ${names?.[at] ?? x[at]}</span>` : ''}</span></figcaption>
    <div class="plot" ref=${place} role="img" aria-label=${`${name}: ${known.length} values, from ${figure(known[0])} to ${figure(known.at(-1))}`}></div></figure>`;
}

export function Overview({groups = [], comparison}) {
  if (!groups.length) return null;
  const names = [...new Set(groups.flatMap((each) => each.rows.map(([name]) => name)))];
  const cells = groups.map((each) => new Map(each.rows));
  const repeated = groups.some((each) => each.runs.length > 1);
  const several = groups.filter((each) => each.pass_at_k.length > 1);
  return html`
    <${Section} title="Figures"><table class="plain beside-each-other"><tbody>${names.map((name) => html`<tr key=${name}><th scope="row">${name}</th>
      ${cells.map((each, at) => html`<td key=${at} class=${(each.get(name) ?? '').length > 40 ? 'long' : ''}><${Shown} text=${each.get(name) ?? '–'} most=${2000} /></td>`)}</tr>`)}</tbody></table></${Section}>
    ${comparison && html`<${Section} title="Comparison"><table class="plain beside-each-other"><tbody>${comparison.map(([name, text]) => html`<tr key=${name}><th scope="row">${name}</th><td><${Shown} text=${text} most=${2000} /></td></tr>`)}</tbody></table></${Section}>`}
    ${repeated && html`<${Section} title="Runs"><table class="plain"><thead><tr><th>Runs</th><th class="number">Number</th><th class="number">Resolved</th><th class="number">Share</th></tr></thead>
      <tbody>${groups.flatMap((each) => each.runs.map((run) => html`<tr key=${`${each.label} ${run.index}`}><td><${Shown} text=${each.label} most=${120} /></td><td class="number">${run.index}</td><td class="number">${count(run.resolved)} of ${count(run.known)}</td><td class="number">${run.known ? percent(run.resolved / run.known) : '–'}</td></tr>`))}</tbody></table></${Section}>`}
    ${several.length > 0 && html`<section><h2>Several attempts</h2>${several.map((each) => html`<${Attempts} key=${each.label} group=${each} alone=${groups.length === 1} />`)}</section>`}
    <${Section} title="What became of the attempts"><table class="plain"><thead><tr><th>Outcome</th>${groups.map((each) => html`<th key=${each.label}><${Shown} text=${each.label} most=${80} /></th>`)}</tr></thead>
      <tbody>${kinds(groups).map((kind) => html`<tr key=${kind}><td>${kind.replaceAll('_', ' ')}</td>${groups.map((each) => html`<td key=${each.label}><span class="line"><span class="share" aria-hidden="true"><u style=${{transform: `scaleX(${each.kinds[kind] / Math.max(1, each.attempts)})`}}></u></span>${count(each.kinds[kind])} <small class="muted">${percent(each.kinds[kind] / Math.max(1, each.attempts))}</small></span></td>`)}</tr>`)}</tbody></table></${Section}>`;
}
const kinds = (groups) => Object.keys(groups[0].kinds).filter((kind) => groups.some((each) => each.kinds[kind]));
const Section = ({title, children}) => html`<section><h2>${title}</h2><div class="wide" tabindex="0" role="region" aria-label=${title}>${children}</div></section>`;

/** Pass@k: one of k attempts solves the task. */
function Attempts({group, alone}) {
  const named = [['Pass', group.pass_at_k, 'main']];
  const known = (found) => found.filter(({estimate}) => typeof estimate.mean === 'number');
  const points = (found) => known(found).map(({k, estimate: {mean, low, high}}) => ({slot: k - 1, value: mean, low, high}));
  return html`${!alone && html`<h3><${Shown} text=${group.label} most=${120} /></h3>`}
    <${Trend} label="Tasks solved by the number of attempts" slots=${group.pass_at_k.map(({k}) => String(k))} series=${named.map(([name, found, kind]) => ({name: `${name}@k, 95 % interval`, kind, points: points(found)}))} />
    <div class="wide" tabindex="0" role="region" aria-label=${`Attempts of ${group.label}`}><table class="plain"><thead><tr><th>Of k attempts</th><th class="number">Share</th><th class="number">95 % interval</th><th class="number">Tasks</th></tr></thead>
      <tbody>${named.flatMap(([name, found]) => known(found).map(({k, estimate: {mean, low, high, n}}) => html`<tr key=${`${name} ${k}`}><td>${name}@${k}</td><td class="number">${fixed(mean, 3)}</td><td class="number">${fixed(low, 3)} to ${fixed(high, 3)}</td><td class="number">${count(n)}</td></tr>`))}</tbody></table></div>`;
}
/** What people labelled and what verifiers say: columns that are there where there are some. */
export const OPINIONS = {human: 'Human', verifier: 'Verifier'};

const columns = (opinions) => [
  ['mark', '', null], ['outcome', 'Reward', 'reward'], ...opinions.map((name) => [`number opinion ${name}`, OPINIONS[name], null]), ['task', 'Task', null], ['policy', 'Policy', null], ['strategy', 'Strategy', null],
  ['stop', 'Stop', null], ['number turns', 'Turns', 'turns'], ['number tokens', 'Tokens', 'tokens'], ['number seconds', 'Time', 'seconds'], ['number when', 'Finished', 'finished'],
];

/** The judged reward, or else what the environment paid. */
export const earned = (row) => row.reward ?? row.return;

/** A reward as a number and a bar; a failed or unfinished episode says so instead. */
export function Outcome({failure, stop, value}) {
  if (failure) return html`<span class="bad" title=${`failed: ${failure}`}>✕ ${failure}</span>`;
  if (stop === 'unfinished') return html`<span class="muted" title="its process is at work, or has ended before the episode did">unfinished</span>`;
  const share = value === null || value === undefined ? 0 : Math.max(0, Math.min(1, value));
  return html`<span class="reward" title=${value === null || value === undefined ? 'not judged' : `reward ${value}`}>
    <b>${reward(value)}</b><i aria-hidden="true"><u style=${{transform: `scaleX(${share})`}}></u></i></span>`;
}

/** Heads sort, where the server can. */
export function HEAD(sort, opinions = []) {
  const [by, up] = sort.startsWith('-') ? [sort.slice(1), false] : [sort, true];
  const next = (name) => put({sort: by === name ? (up ? '' : name) : `-${name}`, n: ''});
  return html`<div class="row head" role="row">${columns(opinions).map(([kind, words, name]) => html`
    <span key=${kind} class=${kind} role="columnheader" aria-sort=${name && by === name ? (up ? 'ascending' : 'descending') : null}>
      ${name ? html`<button class="plain" onClick=${() => next(name)}>${words}${by === name ? (up ? ' ↑' : ' ↓') : ''}</button>` : words || html`<span class="sr">Marked</span>`}</span>`)}</div>`;
}

export function EpisodeRow({number, row, style, params, here, chosen, opinions = []}) {
  if (!row) return html`<div class="row" role="row" aria-rowindex=${number + 1} style=${style}><span role="cell" class="bone w1"></span></div>`;
  const address = link('e', row.id, {...params, n: number});
  return html`<div class=${`row${here ? ' here' : ''}${chosen ? ' chosen' : ''}`} role="row" aria-rowindex=${number + 1} aria-current=${here ? 'true' : null} style=${style}>
    <span class="mark" role="cell"><input type="checkbox" checked=${chosen} aria-label=${`mark ${row.id}`} onChange=${() => mark(row.id)} /></span>
    <span class="outcome" role="cell"><${Outcome} failure=${row.failed} stop=${row.stop} value=${earned(row)} /></span>
    ${opinions.map((name) => html`<span key=${name} class=${`number opinion ${name}`} role="cell" title=${name === 'human' ? 'labels of people, no reward' : 'what a verifier thinks, no reward'}>${reward(row[name])}</span>`)}
    <span class="task" role="cell"><a href=${address}><${Shown} text=${row.task} most=${200} /></a> <small class="muted"><${Shown} text=${row.id} most=${80} /></small>${row.labels && html`<small class="tag">${[...new Set(row.labels)].join(', ')}</small>`}</span>
    <span class="policy" role="cell"><${Shown} text=${policy(row.adapter, row.version, row.model)} most=${80} /></span>
    <span class="strategy muted" role="cell"><${Shown} text=${row.strategy} most=${60} /></span>
    <span class="stop muted" role="cell">${row.stop === 'terminated' ? 'ended' : (row.stop ?? '').replaceAll('_', ' ')}</span>
    <span class="number turns" role="cell">${count(row.turns)}</span>
    <span class="number tokens" role="cell">${short(row.tokens)}</span>
    <span class="number seconds" role="cell">${seconds(row.finished - row.started)}</span>
    <span class="number when muted" role="cell">${when(row.finished)}</span>
  </div>`;
}

/** To where a comment is written. */
export function toRemark() {
  const place = document.getElementById('remark');
  place?.closest('details')?.setAttribute('open', '');
  place?.focus();
}

/** `node` is what comments are about, or of the tokens view the tokens that are selected. */
export function Labels({model, node, store}) {
  const {header} = model;
  const span = param('view') === 'tokens' ? spanOf(param('tokens')) : null;
  const about = sampledIn(span, model) ?? {node};
  const [changed, set] = useState(null);
  const [error, failed] = useState(null);
  const input = useRef(null);
  useEffect(() => set(null), [header]);
  const labels = changed?.id === header.id ? changed.labels : header.labels;
  const add = (fields) => label(header.id, fields, store).then((now) => { set({id: header.id, labels: now}); failed(null); }, failed);
  const comment = (event) => {
    event.preventDefault();
    const text = input.current.value.trim();
    if (!text) return;
    add(text.startsWith('#') ? {kind: 'tag', text: text.slice(1).trim()} : {kind: 'comment', text, ...about}).then(() => { if (input.current) input.current.value = ''; });
    input.current.blur();
  };
  const words = about.tokens ? `Comment on ${plural(about.tokens[1] - about.tokens[0], 'token')}` : 'Comment, or #tag';
  useKeys('Labels', exported ? {} : {
    m: ['comment, or #tag', toRemark],
    Escape: ['', () => document.activeElement?.blur()],
  });
  return html`${labels.length > 0 && html`<ul class="labels">${labels.map((each) => html`<li key=${each.id}>
      <span><b>${each.kind}</b> ${labelWords[each.kind](each)} <${Shown} text=${each.text} most=${2000} />${each.node !== null && html` <${Place} label=${each} prompt=${model.of('prompt_tokens')(each.node)} />`}
      ${' '}<small class="muted"><${Shown} text=${each.author} most=${60} />, ${moment(each.at)}</small></span>
      ${!exported && html`<button class="icon" title="withdraw" aria-label=${`withdraw ${each.kind}`} onClick=${() => add({withdraws: each.id})}>×</button>`}</li>`)}</ul>`}
    ${!exported && html`<div class="line"><button onClick=${() => add({kind: 'verdict', value: 1})}>Good</button><button onClick=${() => add({kind: 'verdict', value: 0})}>Bad</button></div>
      <form class="line comment" onSubmit=${comment}><label class="sr" for="remark">${words}</label><input id="remark" ref=${input} placeholder=${words} autocomplete="off" maxlength="4000" /></form>`}
    ${error && html`<${Problem} error=${error} />`}`;
}

/** What a label is about, and a way there. Labels count sampled tokens; the address counts those of the prompt, too. */
function Place({label: {node, tokens}, prompt}) {
  if (!tokens || prompt === null) return html`<button class="plain small" onClick=${() => put({node, tokens: ''})}>node ${node}</button>`;
  const span = {node, first: prompt + tokens[0], last: prompt + tokens[1] - 1};
  return html`<button class="plain small" onClick=${() => put({view: 'tokens', node, tokens: spanText(span)})}>${plural(tokens[1] - tokens[0], 'token')} of node ${node}</button>`;
}
const LINES = 18;
const CHARACTERS = 2400;

/** A text, cut where it is long. `rest`: the server has more of it, from that character on. */
export function Text({text, kind = '', rest = null, place = null, most = LINES}) {
  const [whole, open] = useState(false);
  const [added, add] = useState({text: '', rest});
  const all = text + added.text;
  const lines = all.split('\n', most + 1);
  const long = lines.length > most || all.length > CHARACTERS;
  const visible = whole || !long ? all : lines.slice(0, most).join('\n').slice(0, CHARACTERS);
  const fetchMore = () => more(place.id, place.node, added.rest, place.store).then((found) => add({text: added.text + found.content, rest: found.rest}), () => {});
  return html`<pre class=${`text ${kind}${long && !whole ? ' cut' : ''}`}><${Shown} text=${visible} /></pre>
    ${long && html`<button class="more" aria-expanded=${whole ? 'true' : 'false'} onClick=${() => open(!whole)}>${whole ? 'Show less' : `Show all ${count(all.length)} characters`}</button>`}
    ${(whole || !long) && added.rest !== null && place && html`<button class="more" onClick=${fetchMore}>Load more</button>`}`;
}

export function Diff({before, after, around}) {
  return html`<${Lines} lines=${hunks(diff(before.split('\n'), after.split('\n')), around)} />`;
}
/** A patch as git writes it. */
export const Patch = ({text}) => html`<${Lines} lines=${text.split('\n').slice(0, 2000).map((line) => (/^(---|\+\+\+|@@|diff )/.test(line) ? ['@', line] : /^[-+]/.test(line) ? [line[0], line.slice(1)] : [' ', line.slice(1)]))} />`;
const KINDS = {'-': 'gone', '+': 'came', '…': 'skip', '@': 'place', ' ': 'same'};
const Lines = ({lines}) => html`<pre class="diff">${lines.map(([sign, line], at) => html`<span key=${at} class=${KINDS[sign]}>${sign === '…' ? `${plural(line, 'line')} unchanged` : html`<i>${sign === '@' ? ' ' : sign}</i><${Shown} text=${line} />`}${'\n'}</span>`)}</pre>`;

/** The arguments as JSON, or null for what is none. */
function parsed(text) {
  try {
    const value = JSON.parse(text);
    return value && typeof value === 'object' && !Array.isArray(value) ? value : null;
  } catch {
    return null;
  }
}

export function Call({call}) {
  const [raw, show] = useState(false);
  const values = parsed(call.arguments);
  return html`<div class="call">
    <div class="name"><b><${Shown} text=${call.name} most=${200} /></b>
      ${values ? html`<button class="plain" aria-pressed=${raw ? 'true' : 'false'} onClick=${() => show(!raw)}>raw</button>` : html`<span class="bad">no valid JSON</span>`}</div>
    ${raw || !values ? html`<${Text} text=${call.arguments} kind="code" />` : html`<${Arguments} values=${values} />`}
  </div>`;
}
const SHELL = ['command', 'cmd', 'code'];

function Arguments({values}) {
  const {old_str: before, new_str: after, ...others} = values;
  const edit = typeof before === 'string' && typeof after === 'string';
  const names = Object.keys(edit ? others : values);
  if (!edit && names.length === 1 && SHELL.includes(names[0]) && typeof values[names[0]] === 'string') {
    return html`<${Text} text=${values[names[0]]} kind="code shell" />`;
  }
  return html`<dl class="arguments">${names.map((name) => html`<div key=${name}><dt><${Shown} text=${name} most=${100} /></dt>
    <dd><${Text} text=${typeof values[name] === 'string' ? values[name] : JSON.stringify(values[name], null, 1)} kind="code" /></dd></div>`)}</dl>
    ${edit && html`<${Diff} before=${before} after=${after} />`}`;
}

/** `body` of `useBody`; `excerpt` holds its place until it is there. */
export function Body({body, excerpt, kind, place, most}) {
  if (body?.error) return html`<${Problem} error=${body.error} />`;
  if (!body) return excerpt ? html`<pre class=${`text waits ${kind}`}><${Shown} text=${excerpt} /></pre>` : null;
  return html`${body.content ? html`<${Text} text=${body.content} kind=${kind} rest=${body.rest} place=${place} most=${most} />` : null}
    ${(body.calls ?? []).map((call, at) => html`<${Call} key=${at} call=${call} />`)}`;
}

export function Figures({model, node, store}) {
  const {header} = model;
  return html`<aside class="right" aria-label="Figures" tabindex="0">
    <details open><summary>Episode</summary><${OfEpisode} header=${header} store=${store} /></details>
    <details open><summary>Judged</summary><${Scores} header=${header} /></details>
    <details open><summary>Labels</summary><${Labels} model=${model} node=${node} store=${store} /></details>
    ${node !== null && html`<details open><summary>Node ${node}</summary><${OfNode} model=${model} at=${node} /></details>`}
    ${Object.keys(header.evidence).length > 0 && html`<details><summary>Evidence</summary><${Evidence} evidence=${header.evidence} /></details>`}
    ${header.task.instruction && html`<details><summary>Task</summary><${Text} text=${header.task.instruction} /></details>`}
  </aside>`;
}

function OfEpisode({header, store}) {
  const {totals, usage, policy: by} = header;
  return html`<${Facts} rows=${[
    ['Policy', policy(by.adapter, by.version, by.base_model)],
    ['Base', by.adapter ? by.base_model : null],
    ['Strategy', header.strategy.name],
    ['Stop', header.stop.replaceAll('_', ' ')],
    ['Turns', count(totals.turns)],
    ['Nodes', totals.nodes > totals.turns * 3 ? count(totals.nodes) : null],
    ['Segments', totals.segments > 1 ? count(totals.segments) : null, 'runs of turns in which each prompt extends the one before'],
    ['Prompt tokens', count(usage.prompt_tokens), `${count(usage.cached_tokens)} of them cached`],
    ['Sampled tokens', count(usage.completion_tokens)],
    ['Calls', count(usage.calls)],
    ['Time', seconds(totals.seconds)],
    ['Finished', moment(header.finished)],
    ['Environment', header.task.environment],
    ['Split', header.task.split],
    ['Run', html`<a href=${link('r', header.run, {store})}><${Shown} text=${header.run} most=${80} /></a>`],
    ['Sub-agent of', header.sub_agent && html`<${Linked} id=${header.sub_agent.parent} kind=${header.sub_agent.kind} store=${store} />`],
    ['Group', html`<a href=${link('g', header.group, {store})}><${Shown} text=${header.group} most=${80} /></a>`],
  ]} />`;
}
const Linked = ({id, kind, store}) => html`<a href=${link('e', id, {store})}>${id.slice(0, 8)} <${Shown} text=${kind} most=${40} /></a> `;

function Scores({header}) {
  const {scores, totals} = header;
  const paid = totals.episode_return;
  if (!scores.length && paid === null) return html`<p class="muted">Not judged yet: <code>openhands-rl score</code></p>`;
  return html`<${Facts} rows=${[
    ...scores.map((score) => [score.version, html`<b>${reward(score.reward)}</b>${score.value !== null ? ` value ${fixed(score.value)}` : ''}`, JSON.stringify(score.detail)]),
    ['Return', paid === null ? null : reward(paid), 'sum of the rewards of the steps'],
  ]} />`;
}

function OfNode({model, at}) {
  const {of} = model;
  return html`<${Facts} rows=${[
    ['Role', of('kind')(at) ?? of('role')(at)],
    ['Turn', of('turn')(at)],
    ['Segment', of('segment')(at), of('cause')(at)],
    ['Begins because', of('cause')(at)],
    ['Reward', of('reward')(at) === null ? null : `${reward(of('reward')(at))}${of('simulated')(at) ? ' in a fork' : ''}`],
    ['Value', of('value')(at) === null ? null : fixed(of('value')(at), 3)],
    ['Visits', of('visits')(at)],
    ['Merged', of('merged')(at), 'equal answers that were taken for this one'],
    ['Dropped', of('dropped')(at)],
    ['New in prompt', of('prompt_tokens')(at) === null ? null : count(of('prompt_tokens')(at))],
    ['Sampled', of('sampled_tokens')(at) === null ? null : count(of('sampled_tokens')(at))],
    ['Context', of('context_tokens')(at) === null ? null : count(of('context_tokens')(at))],
    ['Mean logprob', of('logprob')(at) === null ? null : fixed(of('logprob')(at), 3)],
    ['Temperature', of('temperature')(at)],
    ['Policy', of('policy')(at)],
    ['Finish', of('finish')(at)],
    ['Lacks', (of('lacks')(at) ?? []).join('; ')],
    ...Object.entries(of('search')(at) ?? {}).map(([name, value]) => [name.replaceAll('_', ' '), typeof value === 'object' ? JSON.stringify(value) : String(value)]),
  ]} />`;
}

function Evidence({evidence}) {
  return html`${Object.entries(evidence).map(([name, value]) => html`<section key=${name} class="evidence"><h3><${Shown} text=${name} most=${100} /></h3>
    ${typeof value !== 'string' ? html`<${Text} text=${JSON.stringify(value, null, 1)} kind="code" />` : /^(---|diff )/m.test(value) ? html`<${Patch} text=${value} />` : html`<${Text} text=${value} kind="code" />`}</section>`)}`;
}

/** The newest score that is no opinion, or else the return. */
export function judged(header) {
  const scores = header.scores.filter((score) => score.reward !== null && !/^(verifier|human)-/.test(score.version));
  return scores.at(-1)?.reward ?? header.totals.episode_return;
}
const BY = {stop: 'Stop', failure: 'Failure', adapter: 'Adapter', version: 'Version', task: 'Task', run: 'Run', split: 'Split', strategy: 'Strategy', environment: 'Environment'};
const BARS_HEIGHT = 64;
const narrow = (params) => put({...params, n: ''}, {push: true});

export function Narrow({store, chosen}) {
  const answer = useAnswer(`facets${query({store, ...chosen})}`);
  const later = useRef(null);
  // Counting all values anew is dear, and nobody waits for it: once a second, after the rows.
  useLive((events) => {
    if (later.current || !events.some(({kind}) => kind === 'changed')) return;
    later.current = setTimeout(() => { later.current = null; answer.again(); }, 1000);
  });
  useEffect(() => () => clearTimeout(later.current), []);
  const found = answer.data;
  return html`<aside class="narrow" aria-label="Narrow the list" tabindex="0">
    <details open=${innerWidth > 820}><summary class="sr">Narrow by reward, task, …</summary>
    ${found ? html`<${Rewards} rewards=${found.rewards} bounded=${chosen.min_reward || chosen.max_reward} />
      ${Object.entries(BY).filter(([name]) => chosen[name] || found.facets[name].length > 1).map(([name, words]) => html`<${Facet} key=${name} name=${name} words=${words} values=${found.facets[name].slice(0, 8)} now=${chosen[name]} />`)}`
    : html`<div class="histogram"></div>`}</details>
  </aside>`;
}

function Facet({name, words, values, now}) {
  return html`<section><h2 class="small">${words}</h2><ul>${values.map(({value, count: found}) => html`<li key=${value}>
    <button class="facet" aria-pressed=${value === now ? 'true' : 'false'} onClick=${() => narrow({[name]: value === now ? '' : value})}>
      <span><${Shown} text=${value.replaceAll('_', ' ')} most=${60} /></span><span class="muted">${count(found)}</span></button></li>`)}</ul></section>`;
}

/** How rewards are spread; drawing over it keeps those in between. */
function Rewards({rewards, bounded}) {
  const {low, high, counts, unknown} = rewards;
  const [brush, drag] = useState(null);
  const most = useMemo(() => Math.max(1, ...counts), [counts]);
  if (!counts.length) return html`<section><h2 class="small">Reward</h2><p class="muted">None is judged.</p></section>`;
  const share = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    return Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
  };
  const value = (at) => String(Number((low + (high - low) * at).toPrecision(6)));
  const end = () => {
    if (!brush) return;
    const [from, to] = [Math.min(...brush), Math.max(...brush)];
    const bins = counts.length;
    drag(null);
    narrow({min_reward: value(Math.floor(from * bins) / bins), max_reward: value(Math.ceil(to * bins) / bins)});
  };
  const inside = (bin) => !brush || (bin + 1 > Math.min(...brush) * counts.length && bin < Math.max(...brush) * counts.length);
  return html`<section><h2 class="small">Reward${bounded && html` <button class="plain more" onClick=${() => narrow({min_reward: '', max_reward: ''})}>all</button>`}</h2>
    <svg class="histogram" viewBox=${`0 0 ${counts.length * 5} ${BARS_HEIGHT}`} preserveAspectRatio="none" role="img" aria-label=${`Rewards from ${reward(low)} to ${reward(high)}`}
      onPointerDown=${(event) => { event.currentTarget.setPointerCapture(event.pointerId); drag([share(event), share(event)]); }}
      onPointerMove=${(event) => brush && drag([brush[0], share(event)])} onPointerUp=${end} onPointerCancel=${() => drag(null)}>
      ${counts.map((each, bin) => each > 0 && html`<rect key=${bin} class=${inside(bin) ? 'bin in' : 'bin'} x=${bin * 5} width="4" y=${BARS_HEIGHT - Math.max(2, (each / most) * BARS_HEIGHT)} height=${Math.max(2, (each / most) * BARS_HEIGHT)} />`)}
      ${brush && html`<rect class="brush" x=${Math.min(...brush) * counts.length * 5} width=${Math.abs(brush[1] - brush[0]) * counts.length * 5} y="0" height=${BARS_HEIGHT} />`}
    </svg><p class="scale"><span>${reward(low)}</span>${unknown > 0 && html`<span>${count(unknown)} not judged</span>`}<span>${reward(high)}</span></p></section>`;
}
const NEIGHBOUR_HEIGHT = 52;

export function Neighbours({id, context}) {
  const list = listing(context);
  const at = param('n') === '' ? null : Number(param('n'));
  const total = list.total.value;
  list.tick.value;
  const row = (number, style) => {
    const each = list.row(number);
    if (!each) return html`<div class="neighbour" role="row" key=${number} style=${style}><span role="cell" class="bone w1"></span></div>`;
    return html`<div class=${`neighbour${each.id === id ? ' here' : ''}`} role="row" aria-rowindex=${number + 1} key=${number} style=${style}><span role="cell">
      <a href=${link('e', each.id, {...context, n: number, view: param('view')})} aria-current=${each.id === id ? 'true' : null}>
        <b><${Shown} text=${each.task} most=${80} /></b><${Outcome} failure=${each.failed} stop=${each.stop} value=${earned(each)} />
        <small class="muted"><${Shown} text=${each.id} most=${80} /></small></a></span></div>`;
  };
  return html`<aside class="neighbours" aria-label="The list">
    <p class="strip"><a href=${link('', '', {...context, n: at})}>Episodes</a> <span class="muted">${total === null ? '' : count(total)}</span></p>
    ${total !== null && html`<${Rows} total=${total} height=${NEIGHBOUR_HEIGHT} at=${at} label="Episodes of the list"
      shown=${(first, last) => { for (let page = Math.floor(first / PAGE); page * PAGE < last; page += 1) list.load(page); }}>${row}</${Rows}>`}
  </aside>`;
}
const NAMED = {openhands_rl_plugin: 'plugin', 'openhands-ai': 'OpenHands', 'openhands-sdk': 'OpenHands SDK', python: 'Python'};

export function About({run}) {
  const {facts, records = []} = run;
  const last = records.at(-1);
  const spent = records.reduce((sum, each) => sum + each.finished - each.started, 0);
  return html`<section class="about"><${Facts} rows=${[
    ['Model', facts?.base_model],
    ['Starts from', run.start],
    ['In use', run.adapter ?? (records.length ? 'the base model' : null)],
    ['Seed', facts ? String(facts.seed) : null],
    ['Began', facts?.began ? moment(facts.began) : run.started ? moment(run.started) : null],
    ['Last stage', last ? `${last.name}, ${moment(last.finished)}` : null],
    ['Stages', facts?.stages ? `${count(records.length)} of ${count(facts.stages)}` : records.length ? count(records.length) : null],
    ['Time', records.length ? seconds(spent) : null, 'sum of the finished stages'],
    ['Machine', facts?.machine],
    ['Versions', facts ? Object.entries(facts.versions).map(([name, version]) => `${NAMED[name] ?? name} ${version}`).join(', ') : null],
  ]} />${facts?.command && html`<pre class="text code shell"><${Shown} text=${facts.command} /></pre>`}</section>`;
}

/** Held-out success with its interval and reward, and the reward of the rollouts between. */
export function Success({run}) {
  const {records = [], facts} = run;
  const drawn = useMemo(() => records.filter(({name, metrics}) => typeof metrics.success === 'number' && name !== 'demonstrate'), [records]);
  const held = (each) => each.name.startsWith('evaluate');
  const points = (wanted, point) => drawn.flatMap((each, slot) => (wanted(each) ? [{slot, ...point(each)}] : []));
  const reward = ({metrics}) => ({value: metrics.reward});
  const paid = (each) => typeof each.metrics.reward === 'number';
  if (!drawn.length) return null;
  return html`<section><h2>Success</h2><${Trend} label="Success by stage" slots=${drawn.map((each) => each.name)} series=${[
      {name: 'success on held-out tasks, 95 % interval', kind: 'main', points: points(held, ({metrics, success}) => ({value: metrics.success, low: success?.low, high: success?.high}))},
      {name: 'reward on held-out tasks', kind: 'other', points: points((each) => held(each) && paid(each), reward)},
      {name: 'reward in training', kind: 'dashed', points: points((each) => !held(each) && paid(each), reward)},
    ]} />
    ${facts?.changes.length > 0 && html`<ul class="changes">${facts.changes.map((each) => html`<${Change} key=${each.after} change=${each} />`)}</ul>`}</section>`;
}
const signed = (value) => `${value > 0 ? '+' : ''}${fixed(value)}`;

function Change({change: {name, before, after, difference: {mean, low, high, n}}}) {
  const sure = low > 0 || high < 0;
  return html`<li><b class=${sure ? (mean > 0 ? 'good' : 'bad') : ''}>${signed(mean)}</b> <span><${Shown} text=${name} most=${200} />: 95 % interval of the change in success ${signed(low)} to ${signed(high)}, ${count(n)} tasks
    <span class="muted"> in both ${before} and ${after}${sure ? '' : '; chance alone could do this'}</span></span></li>`;
}

export const Sample = ({pair: {task, before, after}, store}) => html`<article class="sample">
  <header class="line"><h3><${Shown} text=${task} most=${120} /></h3><a href=${link('c', '', {a: before, b: after, store})}>compare turn by turn</a></header>
  <div class="beside"><${One} id=${before} store=${store} /><${One} id=${after} store=${store} /></div></article>`;

function One({id, store}) {
  const answer = useAnswer(`episodes/${encodeURIComponent(id)}${query({store})}`);
  return html`<div class="one"><${Answer} answer=${answer} rows=${4}>${(header) => html`<${Acted} header=${header} store=${store} />`}</${Answer}></div>`;
}
const ROLES = {user: 'Environment', tool: 'Result'};

function Acted({header, store}) {
  const model = useMemo(() => modelOf(header), [header]);
  const shown = model.acted.filter((at) => model.of('role')(at) !== 'system');
  return html`<p class="line"><a href=${link('e', header.id, {store})}><b><${Shown} text=${policy(header.policy.adapter, header.policy.version, header.policy.base_model)} most=${80} /></b></a>
      <${Outcome} failure=${header.failure?.kind} stop=${header.stop} value=${judged(header)} /><span class="muted">${header.stop.replaceAll('_', ' ')} after ${plural(header.totals.turns, 'turn')}</span></p>
    ${shown.map((at) => html`<${Message} key=${at} model=${model} at=${at} store=${store} />`)}`;
}

function Message({model, at, store}) {
  const body = useBody(model, at, store, true);
  const role = model.of('role')(at);
  return html`<div class=${`message ${role}`}><span class="sr">${role === 'assistant' ? 'Model' : ROLES[role] ?? role}</span><${Body} body=${body} excerpt=${model.of('text')(at)} kind=${role === 'assistant' ? 'sampled' : 'code'} most=${8} place=${{id: model.header.id, node: at, store}} /></div>`;
}
