// The pages of episodes, groups, comparisons and the queue; what is at which address, and the key that leads there.
import {useEffect, useMemo, useRef, useState} from 'preact/hooks';
import {PAGE, Shown, ask, cell, count, exported, filters, fixed, go, html, label, link, listing, mark, marked, param, plural, policy, put, query, reward, row, rowsOf, send, signedOut, useAnswer, useKeys, useLive} from 'studio/base';
import {modelOf, siblings, useBody} from 'studio/model';
import {Answer, Body, Empty, EpisodeRow, Facts, Figures, HEAD, Narrow, Neighbours, OPINIONS, Outcome, Problem, Rows, Waiting, judged} from 'studio/parts';
import {Adapters, Evaluations, Runs} from 'studio/runs';
import {Conversation, VIEWS} from 'studio/views';
export function SignIn() {
  const [error, failed] = useState(null);
  const enter = (event) => {
    event.preventDefault();
    const given = event.target.elements.secret.value.trim();
    send('session', {key: new URLSearchParams(given.split('?')[1] ?? '').get('token') ?? given}).then(() => { signedOut.value = false; location.reload(); }, failed);
  };
  return html`<section class="empty"><h1>Open the link that the terminal shows</h1>
    <p><code>openhands-rl studio</code> prints a link with a token.</p>
    <form class="line" onSubmit=${enter}><label>Or paste the link or the key <input name="secret" type="password" autocomplete="off" required /></label>
      <button class="primary">Enter</button></form>
    ${error && html`<${Problem} error=${error} />`}</section>`;
}
const HEIGHT = 36;

export function Episodes() {
  const chosen = filters();
  const params = {store: param('store'), sort: param('sort'), ...chosen};
  const list = listing(params);
  const total = list.total.value;
  const at = param('n') === '' ? null : Number(param('n'));
  const search = useRef(null);
  list.tick.value; // drawn again with every page that comes
  const [changes, changed] = useState(0);
  const refresh = () => { changed(0); list.refresh(); };
  // Rows do not move below somebody who has chosen one: the news wait until they are asked for.
  useLive((events) => {
    if (events.every(({kind}) => kind === 'run' || (kind === 'open' && at !== null))) return;
    if (at === null) refresh();
    else changed((n) => n + 1);
  });
  const opinions = Object.keys(OPINIONS).filter((name) => list.has(name));
  const move = (by) => put({n: Math.min(Math.max(0, (at ?? (by > 0 ? -1 : 0)) + by), Math.max(0, (total ?? 1) - 1))});
  const open = async () => {
    const id = await list.idAt(at ?? 0);
    if (id) go(link('e', id, {...params, n: at ?? 0}));
  };
  const compare = () => {
    const [a, b] = marked.value.slice(-2);
    if (b) go(link('c', '', {a, b, store: params.store}));
  };
  useKeys('Episodes', {
    j: ['next', () => move(1)], k: ['previous', () => move(-1)],
    ArrowDown: ['', () => move(1)], ArrowUp: ['', () => move(-1)],
    PageDown: ['', () => move(15)], PageUp: ['', () => move(-15)],
    Home: ['first', () => put({n: 0})], End: ['last', () => put({n: (total ?? 1) - 1})],
    Enter: ['open', open], r: ['show what is new', refresh],
    x: ['mark', () => list.row(at ?? 0) && mark(list.row(at ?? 0).id)],
    '=': ['compare the two marked last', compare],
    '/': ['search', () => search.current?.focus()],
    Escape: ['', () => (document.activeElement === search.current ? search.current.blur() : (marked.value = []))],
  });
  return html`<div class="page episodes">
    <h1 class="sr">Episodes</h1>
    ${!exported && html`<${Search} input=${search} chosen=${chosen} error=${list.error.value} />`}
    <div class="columns">
      ${!exported && html`<${Narrow} store=${params.store} chosen=${chosen} />`}
      <section class="middle" aria-label="Episodes found">
        <${Selection} news=${changes} refresh=${refresh} total=${total} params=${params} compare=${compare} />
        ${list.error.value && total === null
          ? list.error.value.status === 400
            ? html`<${Empty} title="The filters were not understood">What is wrong with them stands below the search. <a href=${link('', '', {store: params.store})}>Show all episodes</a></${Empty}>`
            : html`<${Problem} error=${list.error.value} again=${() => list.refresh()} />`
          : total === null ? html`<${Waiting} rows=${14} />`
          : total === 0 ? html`<${Nothing} chosen=${chosen} />`
          : html`<${Rows} total=${total} height=${HEIGHT} at=${at} label="Episodes" more=${opinions.length} head=${HEAD(params.sort, opinions)}
              shown=${(first, last) => { for (let page = Math.floor(first / PAGE); page * PAGE < last; page += 1) list.load(page); }}>
              ${(number, style) => html`<${EpisodeRow} key=${number} number=${number} row=${list.row(number)} style=${style} params=${params}
                opinions=${opinions} here=${number === at} chosen=${marked.value.includes(list.row(number)?.id)} />`}
            </${Rows}>`}
      </section>
    </div>
  </div>`;
}

function Search({input, chosen, error}) {
  const text = chosen.contains ?? '';
  useEffect(() => { if (input.current !== document.activeElement) input.current.value = text; }, [text]);
  const submit = (event) => {
    event.preventDefault();
    put({contains: input.current.value.trim(), n: ''}, {push: true});
  };
  const others = Object.entries(chosen).filter(([name]) => name !== 'contains');
  const wrong = error?.status === 400;
  return html`<form class="search" role="search" onSubmit=${submit}>
    <label class="sr" for="contains">Text in an episode’s id, run, group, task, environment, strategy, model or adapter</label>
    <input id="contains" ref=${input} type="search" spellcheck="false" autocomplete="off" autocapitalize="none" defaultValue=${text}
      aria-invalid=${wrong ? 'true' : null} aria-describedby="search-note" placeholder="a part of an id, run, group, task, environment, strategy, model or adapter" />
    <button class="primary">Search</button>
    ${others.length > 0 && html`<p class="line chosen">${others.map(([name, value]) => html`<button type="button" key=${name} class="more" aria-label=${`no longer ${name} ${value}`} onClick=${() => put({[name]: '', n: ''}, {push: true})}>${name.replace('_', ' ')}: <${Shown} text=${value} most=${60} /> ×</button>`)}</p>`}
    <p id="search-note" class=${wrong ? 'wrong' : 'sr'} role=${error ? 'alert' : null}>${wrong ? error.message : 'Upper and lower case differ.'}</p>
  </form>`;
}

function Selection({news, refresh, total, params, compare}) {
  const ids = marked.value;
  return html`<div class="strip">
    <span class="count" aria-live="polite">${total === null ? '…' : plural(total, 'episode')}</span>
    ${news > 0 && html`<button class="more" onClick=${refresh}>${plural(news, 'change')}, show</button>`}
    <span class="grow"></span>
    ${ids.length > 0 && html`<span class="muted">${count(ids.length)} marked</span>
      <button disabled=${ids.length < 2} onClick=${compare}>Compare</button>
      ${!exported && html`<a class="button" download="episodes.html" href=${`/api/export${query({ids: ids.join(','), store: params.store})}`}>Export</a>`}
      <button onClick=${() => { marked.value = []; }}>Clear</button>`}
  </div>`;
}

const Nothing = ({chosen}) => (Object.keys(chosen).length
  ? html`<${Empty} title="No episode is like that">Leave a filter out, or <a href=${link('', '', {store: param('store')})}>show all episodes</a>.</${Empty}>`
  : html`<${Empty} title="No episodes yet">They appear here while they are recorded: <code>openhands-rl run</code>, <code>openhands-rl demo</code>, or a recording gateway, into this store.</${Empty}>`);

export function Episode({id}) {
  const store = param('store');
  const answer = useAnswer(`episodes/${encodeURIComponent(id)}${query({store})}`, {keep: false});
  const context = {store, sort: param('sort'), ...filters()};
  useSteps(id, context);
  // An episode that is being recorded grows on the page.
  useLive((events) => events.some(({kind}) => kind === 'reset' || (kind === 'changed' && answer.data?.stop === 'unfinished')) && answer.again());
  return html`<div class="page episode">
    <${Neighbours} id=${id} context=${context} />
    <${Answer} answer=${answer} rows=${12}>${(header) => html`<${Opened} header=${header} store=${store} />`}</${Answer}>
  </div>`;
}

/** `j` and `k` go on in the list that the episode was opened from. */
function useSteps(id, context) {
  const number = param('n') === '' ? null : Number(param('n'));
  const step = async (by) => {
    const to = (number ?? -1) + by;
    const next = await listing(context).idAt(to);
    if (next) go(link('e', next, {...context, n: to, view: param('view')}));
  };
  useKeys('Episode', {
    j: ['next episode of the list', () => step(1)], k: ['previous episode of the list', () => step(-1)],
    x: ['mark', () => mark(id)],
    '=': ['compare with the one marked last', () => {
      const other = marked.value.filter((each) => each !== id).at(-1);
      if (other) go(link('c', '', {a: other, b: id, store: context.store}));
    }],
    u: ['back to the list', () => go(link('', '', {...context, n: number}))],
  });
}

function Opened({header, store}) {
  const model = useMemo(() => modelOf(header), [header]);
  const names = Object.keys(VIEWS);
  const view = names.includes(param('view')) ? param('view') : 'conversation';
  const node = param('node') === '' ? null : Math.min(model.total - 1, Number(param('node')) || 0);
  const choose = (at) => at !== null && at !== undefined && put({node: at, tokens: ''});
  const step = (by) => {
    const now = model.answers.findIndex((each) => each >= (node ?? -1));
    const here = node === null ? -1 : now < 0 ? model.answers.length : model.answers[now] === node || by > 0 ? now - (model.answers[now] === node ? 0 : 1) : now;
    choose(model.answers[Math.min(Math.max(0, here + by), model.answers.length - 1)]);
  };
  const beside = (by) => {
    if (node === null) return;
    const all = siblings(model, node);
    choose(all[(all.indexOf(node) + by + all.length) % all.length]);
  };
  useKeys('Views', {
    ...Object.fromEntries(names.map((name) => [VIEWS[name].key, [`view: ${VIEWS[name].name}`, () => put({view: name}, {push: true})]])),
    ArrowRight: ['next turn', () => step(1)], ArrowLeft: ['previous turn', () => step(-1)],
    ArrowDown: ['', () => step(1)], ArrowUp: ['', () => step(-1)],
    ']': ['next answer to the same', () => beside(1)], '[': ['previous answer to the same', () => beside(-1)],
  });
  useEffect(() => { document.getElementById('view')?.scrollTo({top: 0}); }, [header.id, view]);
  const View = VIEWS[view].component;
  return html`
    <section class="middle">
      <header class="title">
        <h1><${Shown} text=${header.task.id} most=${120} /></h1>
        <${Outcome} failure=${header.failure?.kind} stop=${header.stop} value=${judged(header)} />
        <p class="muted id"><${Shown} text=${header.id} /></p>
      </header>
      <div class="tabs" role="tablist" aria-label="Views">${names.map((name) => html`
        <button key=${name} role="tab" id=${`tab-${name}`} aria-selected=${name === view ? 'true' : 'false'} aria-controls="view" onClick=${() => put({view: name}, {push: true})}>${VIEWS[name].name}</button>`)}</div>
      ${header.failure && html`<p class="problem"><b>${header.failure.kind}</b> at <${Shown} text=${header.failure.boundary} />: <${Shown} text=${header.failure.message} /></p>`}
      <div class="view" id="view" role="tabpanel" aria-labelledby=${`tab-${view}`} tabindex="0"><${View} model=${model} node=${node} choose=${choose} store=${store} /></div>
    </section>
    <${Figures} model=${model} node=${node} store=${store} />`;
}
const TURN_HEIGHT = 30;

export function Group({id}) {
  const store = param('store');
  const answer = useAnswer(`groups/${id.split('/').map(encodeURIComponent).join('/')}${query({store})}`, {keep: false});
  return html`<div class="page group"><${Answer} answer=${answer} rows=${12}>${(group) => (rowsOf(group.samples)
    ? html`<${OpenedGroup} group=${group} store=${store} />` : html`<${Empty} title="No samples">No store has an episode of this group.</${Empty}>`)}</${Answer}></div>`;
}

function OpenedGroup({group, store}) {
  const lines = useMemo(() => linesOf(group), [group]);
  const [at, set] = useState(0);
  const open = (line) => line && go(link('e', line.episode, {node: line.node, store}));
  useKeys('Group', {
    j: ['next line', () => set(Math.min(at + 1, lines.length - 1))], k: ['previous line', () => set(Math.max(at - 1, 0))],
    ArrowDown: ['', () => set(Math.min(at + 1, lines.length - 1))], ArrowUp: ['', () => set(Math.max(at - 1, 0))],
    n: ['next difference', () => set(Math.max(0, lines.findIndex((each, number) => number > at && each.forks)))],
    Enter: ['open the episode there', () => open(lines[at])],
  });
  const shown = rowsOf(group.samples);
  return html`
    <header class="title"><h1><${Shown} text=${group.task.id} most=${120} /></h1>
      <span>${plural(group.total, 'sample')}${group.total > shown ? `, ${shown} shown` : ''}</span>
      ${group.signal ? html`<span class="chip good">signal</span>` : html`<span class="chip" title="GRPO learns from differences within a group">no signal: all rewards are equal</span>`}
      <p class="muted id"><${Shown} text=${group.id} most=${120} /></p></header>
    <div class="columns">
      <section class="middle" aria-label="Turns"><${Rows} total=${lines.length} height=${TURN_HEIGHT} at=${at} label="Turns of all samples">
        ${(number, style) => html`<${Line} key=${number} line=${lines[number]} here=${number === at} style=${style} store=${store} total=${shown} />`}</${Rows}></section>
      <aside class="right" aria-label="Samples" tabindex="0"><${Samples} samples=${group.samples} store=${store} /></aside>
    </div>`;
}

/** The tree as lines, from above to below; only a fork moves them to the right. */
function linesOf(group) {
  const {turns, samples} = group;
  const total = rowsOf(turns);
  const children = Array.from({length: total}, () => []);
  const roots = [];
  for (let at = 0; at < total; at += 1) (cell(turns, 'parent', at) === null ? roots : children[turns.parent[at]]).push(at);
  const lines = [];
  const add = (at, depth) => {
    for (let now = at; now !== null;) {
      const below = children[now];
      const here = cell(turns, 'samples', now) ?? [];
      const ended = here.filter((each) => !below.some((child) => turns.samples[child].includes(each)));
      const forks = below.length + ended.length > 1;
      const calls = cell(turns, 'calls', now);
      lines.push({depth, role: turns.role[now], text: cell(turns, 'text', now) ?? '', calls: calls?.join(', '), samples: here.length, forks, episode: samples.id[here[0]], node: turns.nodes[now][0]});
      for (const each of ended) lines.push({depth: depth + (forks ? 1 : 0), leaf: row(samples, each), episode: samples.id[each], node: ''});
      if (below.length !== 1 || forks) {
        for (const child of below) add(child, depth + 1);
        now = null;
      } else [now] = below;
    }
  };
  for (const root of roots) add(root, 0);
  return lines;
}
const DEEPEST = 14;

function Line({line, here, style, store, total}) {
  const indent = html`<span class="indent" style=${{width: `${Math.min(line.depth, DEEPEST) * 16}px`}} aria-hidden="true">${Array.from({length: Math.min(line.depth, DEEPEST)}, (_, n) => html`<i key=${n}></i>`)}</span>`;
  if (line.leaf) {
    const {leaf} = line;
    return html`<div class=${`twig leaf${here ? ' here' : ''}`} role="row" style=${style}><span role="cell">${indent}<a href=${link('e', leaf.id, {store})}><${Shown} text=${leaf.id} most=${80} /></a>
      <${Outcome} failure=${leaf.failed} stop=${leaf.stop} value=${leaf.reward} /><${Advantage} value=${leaf.advantage} /></span></div>`;
  }
  return html`<div class=${`twig ${line.role === 'assistant' ? 'sampled' : 'heard'}${here ? ' here' : ''}${line.forks ? ' forks' : ''}`} role="row" style=${style}><span role="cell">${indent}
    <span class="share" title=${`${line.samples} of ${total} samples`}><u style=${{transform: `scaleX(${line.samples / total})`}}></u></span>
    <small class="muted role">${line.role === 'assistant' ? 'model' : line.role}</small>
    <a href=${link('e', line.episode, {node: line.node, store})}>${line.calls && html`<b><${Shown} text=${line.calls} most=${60} /></b> `}<${Shown} text=${line.text.replace(/\s+/g, ' ')} most=${160} /></a></span></div>`;
}

export function Advantage({value}) {
  if (value === null || value === undefined) return null;
  return html`<span class=${`advantage ${value < 0 ? 'bad' : value > 0 ? 'good' : 'muted'}`} title="GRPO's advantage">${value > 0 ? '+' : ''}${fixed(value)}</span>`;
}

function Samples({samples, store}) {
  const order = Array.from({length: rowsOf(samples)}, (_, at) => row(samples, at)).sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  return html`<h2>Samples</h2><ul class="samples">${order.map((each) => html`<li key=${each.id}>
    <a href=${link('e', each.id, {store})}><${Shown} text=${each.id} most=${60} /></a>
    <span class="line"><${Outcome} failure=${each.failed} stop=${each.stop} value=${each.reward} /><${Advantage} value=${each.advantage} />
    <small class="muted">${plural(each.turns ?? 0, 'turn')}, <${Shown} text=${policy(each.adapter, each.version, 'base')} /></small></span></li>`)}</ul>
    ${order.length > 1 && html`<p><a class="button" href=${link('c', '', {a: order[0].id, b: order.at(-1).id, store})}>Compare best and worst</a></p>`}
    <p class="muted">${reward(order[0]?.reward)} is the best reward. The advantage is GRPO’s, of the rewards that are known now.</p>`;
}

export function Compare() {
  const [a, b] = [param('a'), param('b')];
  const store = param('store');
  return html`<div class="page compare">${a && b ? html`<${Pair} a=${a} b=${b} store=${store} />` : html`<${Empty} title="Compare two episodes">Mark them in the list and press =.</${Empty}>`}</div>`;
}
const header = (id, store) => `episodes/${encodeURIComponent(id)}${query({store})}`;

function Pair({a, b, store}) {
  const rows = useAnswer(`compare${query({a, b, store})}`, {keep: false});
  const left = useAnswer(header(a, store), {keep: false});
  const right = useAnswer(header(b, store), {keep: false});
  return html`<h1 class="sr">Compare two episodes</h1><${Answer} answer=${rows}>${(found) => html`<${Answer} answer=${left}>${(one) => html`<${Answer} answer=${right}>${(other) => html`
    <${Sides} found=${found} one=${one} other=${other} store=${store} />`}</${Answer}>`}</${Answer}>`}</${Answer}>`;
}

function Sides({found, one, other, store}) {
  const models = useMemo(() => [modelOf(one), modelOf(other)], [one, other]);
  const groups = useMemo(() => runs(found.rows), [found]);
  const [at, set] = useState(-1);
  const differing = groups.map((each, number) => (each.same ? null : number)).filter((each) => each !== null);
  const jump = (by) => {
    const to = by > 0 ? differing.find((each) => each > at) ?? differing[0] : [...differing].reverse().find((each) => each < at) ?? differing.at(-1);
    if (to === undefined) return;
    set(to);
    document.getElementById(`part-${to}`)?.scrollIntoView({block: 'start'});
  };
  useKeys('Compare', {n: ['next difference', () => jump(1)], N: ['previous difference', () => jump(-1)], s: ['change sides', () => put({a: other.id, b: one.id})]});
  return html`<div class="pair head">${[one, other].map((each, side) => html`<${Head} key=${side} header=${each} store=${store} />`)}</div>
    ${!found.same_task && html`<p class="note">These are episodes of different tasks.</p>`}
    <div class="sides" tabindex="0" role="region" aria-label="Turns beside each other">${groups.map((each, number) => html`<${Part} key=${number} id=${`part-${number}`} group=${each} models=${models} store=${store} here=${number === at} />`)}
      ${groups.every((each) => each.same) && html`<p class="note">There is no difference.</p>`}</div>`;
}

const Head = ({header: each, store}) => html`<div><h2><a href=${link('e', each.id, {store})}><${Shown} text=${each.task.id} most=${80} /></a></h2>
  <div class="line"><${Outcome} failure=${each.failure?.kind} stop=${each.stop} value=${judged(each)} /><span class="muted"><${Shown} text=${policy(each.policy.adapter, each.policy.version, each.policy.base_model)} />, ${plural(each.totals.turns, 'turn')}</span></div>
  <small class="muted id"><${Shown} text=${each.id} most=${80} /></small></div>`;

/** Rows that follow each other and are the same, or are not, as one part. */
function runs(rows) {
  const groups = [];
  for (let at = 0; at < rowsOf(rows); at += 1) {
    const {a, b, same} = row(rows, at);
    if (groups.at(-1)?.same !== Boolean(same)) groups.push({same: Boolean(same), rows: []});
    groups.at(-1).rows.push([a, b]);
  }
  return groups;
}

function Part({id, group, models, store, here}) {
  const [open, set] = useState(false);
  if (group.same && !open) return html`<button class="fold" id=${id} onClick=${() => set(true)}>${plural(group.rows.length, 'message')} the same</button>`;
  return html`<div id=${id} class=${`part${here ? ' here' : ''}${group.same ? '' : ' differs'}`}>${group.rows.map(([a, b], at) => html`<div class="pair" key=${at}>
    ${[a, b].map((node, side) => html`<${Side} key=${side} model=${models[side]} node=${node} store=${store} />`)}</div>`)}</div>`;
}

function Side({model, node, store}) {
  const body = useBody(model, node ?? 0, store, node !== null);
  if (node === null) return html`<div class="missing"><span class="sr">nothing</span></div>`;
  const role = model.of('role')(node);
  return html`<div class=${`one ${role}`}><a class="muted" href=${link('e', model.header.id, {node, store})}>${role === 'assistant' ? `turn ${model.of('turn')(node) ?? '–'}` : role}</a>
    <${Body} body=${body} excerpt=${model.of('text')(node)} kind=${role === 'tool' ? 'code' : 'sampled'} place=${{id: model.header.id, node, store}} /></div>`;
}

export function Queue() {
  const params = {store: param('store'), ...filters()};
  const pairs = param('pairs') === '1';
  const number = Number(param('n')) || 0;
  const list = listing(params);
  list.tick.value;
  const total = list.total.value;
  useEffect(() => { list.load(Math.floor(number / 100)); }, [number, list]);
  const id = list.row(number)?.id;
  const go = (by) => put({n: Math.max(0, number + by)});
  useKeys('Queue', {j: ['skip', () => go(1)], k: ['back', () => go(-1)], ArrowRight: ['', () => go(1)], ArrowLeft: ['', () => go(-1)]});
  const submit = (event) => {
    event.preventDefault();
    put({contains: event.target.elements.contains.value.trim(), n: ''}, {push: true});
  };
  return html`<div class="page queue">
    <header class="title"><h1>Queue</h1>
      <form class="line grow" onSubmit=${submit}><label class="sr" for="queued">Which episodes</label><input id="queued" name="contains" class="grow" spellcheck="false" defaultValue=${params.contains} placeholder="a part of an id, run, task, adapter, … as in the list" /><button>Show</button></form>
      <button aria-pressed=${params.unlabelled ? 'true' : 'false'} onClick=${() => put({unlabelled: params.unlabelled ? '' : '1', n: ''})}>Unlabelled</button>
      <button aria-pressed=${pairs ? 'true' : 'false'} onClick=${() => put({pairs: pairs ? '' : '1', n: ''})}>Pairs</button>
      <span class="muted">${!total ? '' : `${Math.min(number + 1, total)} of ${total}`}</span></header>
    ${list.error.value ? html`<${Problem} error=${list.error.value} again=${() => list.refresh()} />`
      : total === 0 ? html`<${Empty} title="Nothing to judge">No episode is like that. Leave a filter out.</${Empty}>`
      : total !== null && number >= total ? html`<${Empty} title="That was all">${plural(total, 'episode')} were shown. <button onClick=${() => put({n: ''})}>Begin again</button></${Empty}>`
      : !id ? html`<${Waiting} />`
      : pairs ? html`<${Two} key=${id} id=${id} store=${params.store} next=${() => go(1)} />`
      : html`<${One} key=${id} id=${id} store=${params.store} next=${() => go(1)} />`}
  </div>`;
}

function useSending() {
  const [error, failed] = useState(null);
  const busy = useRef(false);
  const send = (work) => {
    if (busy.current) return;
    busy.current = true;
    work().then(() => failed(null), failed).finally(() => { busy.current = false; });
  };
  return [error, send];
}

function One({id, store, next}) {
  const answer = useAnswer(header(id, store), {keep: false});
  const [error, send] = useSending();
  const input = useRef(null);
  const verdict = (value) => answer.data && send(() => label(id, {kind: 'verdict', value}, store).then(next));
  const comment = (event) => {
    event.preventDefault();
    const text = input.current.value.trim();
    if (text) send(() => label(id, {kind: 'comment', text}, store).then(() => { input.current.value = ''; input.current.blur(); }));
  };
  useKeys('Judge', {
    y: ['good', () => verdict(1)], n: ['bad', () => verdict(0)],
    m: ['comment', () => input.current?.focus()], Escape: ['', () => document.activeElement?.blur()],
  });
  return html`<${Answer} answer=${answer} rows=${10}>${(found) => html`<div class="view" tabindex="0" role="region" aria-label="Episode"><${Reading} header=${found} store=${store} /></div>`}</${Answer}>
    ${error && html`<${Problem} error=${error} />`}
    <footer class="verdicts"><button onClick=${() => verdict(1)}><kbd>y</kbd> Good</button><button onClick=${() => verdict(0)}><kbd>n</kbd> Bad</button><button onClick=${next}><kbd>j</kbd> Skip</button>
      <form class="grow" onSubmit=${comment}><label class="sr" for="remark">Comment</label><input id="remark" ref=${input} placeholder="Comment (m)" autocomplete="off" maxlength="4000" /></form></footer>`;
}

/** The conversation alone: neither rewards nor who sampled it. */
function Reading({header: found, store}) {
  const model = useMemo(() => {
    const {reward, value, logprob, policy, visits, ...nodes} = found.nodes;
    return modelOf({...found, nodes});
  }, [found]);
  return html`<p class="asked"><b>Task</b> <${Shown} text=${found.task.instruction || found.task.id} most=${600} /></p><${Conversation} model=${model} node=${null} choose=${() => {}} store=${store} />`;
}

/** Another sample of the same group, always the same one for an episode; which side it stands on follows from both ids. */
async function partner(id, group, store) {
  const found = await ask(`groups/${group.split('/').map(encodeURIComponent).join('/')}${query({store})}`);
  const others = Array.from({length: rowsOf(found.samples)}, (_, at) => cell(found.samples, 'id', at)).filter((each) => each !== id);
  return others.length ? others[hash(id) % others.length] : null;
}

function hash(text) {
  let value = 2166136261;
  for (const each of text) value = Math.imul(value ^ each.codePointAt(0), 16777619) >>> 0;
  return value;
}

function Two({id, store, next}) {
  const first = useAnswer(header(id, store), {keep: false});
  const [other, found] = useState(undefined);
  const second = useAnswer(other ? header(other, store) : null, {keep: false});
  const [error, send] = useSending();
  const group = first.data?.group;
  useEffect(() => { if (group) partner(id, group, store).then(found, () => found(null)); }, [id, group, store]);
  const swapped = hash(`${id} ${other}`) % 2 === 1;
  const ready = Boolean(first.data && second.data);
  const say = (side) => ready && send(() => label(id, {kind: 'preference', other, value: side === 0 ? 0.5 : (side === 1) !== swapped ? 1 : 0}, store).then(next));
  useKeys('Judge', {1: ['the left one is better', () => say(1)], 2: ['the right one is better', () => say(2)], 0: ['neither', () => say(0)]});
  if (other === null) return html`<${Empty} title="Only one sample">This task has no other sample to compare with. <button onClick=${next}>Next</button></${Empty}>`;
  const sides = swapped ? [second, first] : [first, second];
  return html`<div class="two">${sides.map((each, side) => html`<section key=${side} class="view" tabindex="0" aria-label=${side ? 'Right' : 'Left'}><${Answer} answer=${each}>${(data) => html`<${Reading} header=${data} store=${store} />`}</${Answer}></section>`)}</div>
    ${error && html`<${Problem} error=${error} />`}
    <footer class="verdicts"><button disabled=${!ready} onClick=${() => say(1)}><kbd>1</kbd> Left is better</button><button disabled=${!ready} onClick=${() => say(2)}><kbd>2</kbd> Right is better</button><button disabled=${!ready} onClick=${() => say(0)}><kbd>0</kbd> Neither</button><button onClick=${next}><kbd>j</kbd> Skip</button></footer>`;
}
export const PAGES = {
  '': {name: 'Episodes', nav: 'e', key: 'e', needs: 'episodes', component: Episodes},
  e: {name: 'Episode', below: 'e', component: Episode},
  g: {name: 'Group', below: 'e', component: Group},
  r: {name: 'Runs', nav: 'r', key: 'r', needs: 'runs', component: Runs},
  a: {name: 'Adapters', nav: 'a', key: 'a', needs: 'adapters', component: Adapters},
  v: {name: 'Evaluations', nav: 'v', key: 'v', needs: 'evaluations', component: Evaluations},
  c: {name: 'Compare', nav: 'c', key: 'c', component: Compare},
  q: {name: 'Queue', nav: 'q', key: 'q', component: Queue},
};
