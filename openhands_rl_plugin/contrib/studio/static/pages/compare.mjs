// Two episodes turn by turn, or two sets of episodes task by task.
import {useMemo, useState} from 'preact/hooks';
import {html} from 'studio/base/html';
import {Shown} from 'studio/base/text';
import {query, row, rowsOf, useAnswer} from 'studio/base/api';
import {modelOf, useBody} from 'studio/base/episode';
import {count, fixed, percent, plural, policy} from 'studio/base/format';
import {useKeys} from 'studio/base/keys';
import {link, param, put} from 'studio/base/route';
import {Outcome} from 'studio/parts/episode_row';
import {Body} from 'studio/parts/message';
import {Rows} from 'studio/parts/rows';
import {Answer, Empty, Facts} from 'studio/parts/states';
import {judged} from 'studio/parts/figures';

export function Compare() {
  const [a, b, of] = [param('a'), param('b'), param('of')];
  const store = param('store');
  if (of === 'sets' || !a || !b) return html`<div class="page compare"><${Sets} a=${a} b=${b} store=${store} ready=${of === 'sets' && a && b} /></div>`;
  return html`<div class="page compare"><${Pair} a=${a} b=${b} store=${store} /></div>`;
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
    <${Body} body=${body} excerpt=${model.of('text')(node)} kind=${role === 'tool' ? 'code' : 'said'} place=${{id: model.header.id, node, store}} /></div>`;
}

function Sets({a, b, store, ready}) {
  const answer = useAnswer(ready ? `compare${query({of: 'sets', a, b, store})}` : null, {keep: false});
  const submit = (event) => {
    event.preventDefault();
    put({of: 'sets', a: event.target.elements.a.value.trim(), b: event.target.elements.b.value.trim()}, {push: true});
  };
  return html`<header class="title"><h1>Compare</h1><p class="muted">Two versions of adapters (NAME@VERSION) or two runs, on the same tasks: what the second one gained and lost. Two episodes: mark them in the list and press =.</p></header>
    <form class="queries" onSubmit=${submit}>
      <label>From <input name="a" required spellcheck="false" defaultValue=${a} placeholder="shop@7" /></label>
      <label>to <input name="b" required spellcheck="false" defaultValue=${b} placeholder="shop@9" /></label>
      <button class="primary">Compare</button></form>
    ${ready && html`<${Answer} answer=${answer}>${(found) => html`<${Gains} found=${found} store=${store} />`}</${Answer}>`}`;
}

function Gains({found, store}) {
  if (!found.tasks) return html`<${Empty} title="No task in common">The first one has ${plural(found.only_a, 'task')}, the second one ${plural(found.only_b, 'task')}, and none is the same.</${Empty}>`;
  const {difference} = found;
  const sure = difference && (difference.low > 0 || difference.high < 0);
  return html`<div class="columns"><section class="middle">
      <${Rows} total=${rowsOf(found.rows)} height=${34} label="Tasks" head=${html`<div class="row head tasks" role="row"><span role="columnheader">Task</span><span class="number" role="columnheader">From</span><span class="number" role="columnheader">To</span><span class="number" role="columnheader">Change</span></div>`}>
        ${(number, style) => html`<${TaskRow} key=${number} row=${row(found.rows, number)} style=${style} store=${store} />`}</${Rows}></section>
    <aside class="right" aria-label="Figures" tabindex="0"><h2>${difference ? `${difference.mean > 0 ? '+' : ''}${fixed(difference.mean * 100, 1)} points` : 'Not judged'}</h2>
      <p class=${sure ? (difference.mean > 0 ? 'good' : 'bad') : 'muted'}>${!difference ? '' : sure ? 'More than chance.' : 'Chance alone could do this.'}</p>
      <${Facts} rows=${[
        ['Tasks in both', count(found.tasks)], ['Gained', count(found.gained)], ['Lost', count(found.lost)],
        ['Success before', percent(found.rate_a)], ['Success after', percent(found.rate_b)],
        ['95 % interval', difference ? `${fixed(difference.low * 100, 1)} to ${fixed(difference.high * 100, 1)}` : null],
        ['p', found.p === null ? null : fixed(found.p, 3), found.test], ['Only in the first', count(found.only_a)], ['Only in the second', count(found.only_b)],
      ]} /></aside></div>`;
}

function TaskRow({row: each, style, store}) {
  const change = each.a === null || each.b === null ? null : each.b - each.a;
  const words = html`<${Shown} text=${each.task} most=${120} />`;
  return html`<div class="row tasks" role="row" style=${style}><span role="cell">${each.a_id && each.b_id ? html`<a href=${link('c', '', {a: each.a_id, b: each.b_id, store})}>${words}</a>` : words}</span>
    <span class="number" role="cell">${percent(each.a)}</span><span class="number" role="cell">${percent(each.b)}</span>
    <span class=${`number ${change > 0 ? 'good' : change < 0 ? 'bad' : 'muted'}`} role="cell">${change === null ? '–' : `${change > 0 ? '+' : ''}${fixed(change * 100, 0)}`}</span></div>`;
}
