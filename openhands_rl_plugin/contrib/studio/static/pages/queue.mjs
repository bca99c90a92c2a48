// One episode after the other, or two beside each other, for people to judge. What a grader or a policy says stays hidden.
import {useEffect, useMemo, useRef, useState} from 'preact/hooks';
import {html} from 'studio/base/html';
import {Shown} from 'studio/base/text';
import {ask, cell, query, rowsOf, useAnswer} from 'studio/base/api';
import {modelOf} from 'studio/base/episode';
import {plural} from 'studio/base/format';
import {useKeys} from 'studio/base/keys';
import {label} from 'studio/base/labels';
import {listing} from 'studio/base/listing';
import {filters, param, put} from 'studio/base/route';
import {judged} from 'studio/parts/figures';
import {said} from 'studio/parts/help';
import {Answer, Empty, Problem, Waiting} from 'studio/parts/states';
import {Conversation} from 'studio/views/conversation';

const header = (id, store) => `episodes/${encodeURIComponent(id)}${query({store})}`;

export function Queue() {
  const params = {store: param('store'), ...filters()};
  const pairs = param('pairs') === '1';
  const number = Number(param('n')) || 0;
  const list = listing(params);
  list.tick.value;
  const total = list.total.value;
  const [tally, count] = useState({asked: 0, agreed: 0});
  useEffect(() => { list.load(Math.floor(number / 100)); }, [number, list]);
  const id = list.row(number)?.id;
  const go = (by) => put({n: Math.max(0, number + by)});
  useKeys('Queue', {j: ['skip', () => go(1)], k: ['back', () => go(-1)], ArrowRight: ['', () => go(1)], ArrowLeft: ['', () => go(-1)]});
  const submit = (event) => {
    event.preventDefault();
    put({contains: event.target.elements.contains.value.trim(), n: ''}, {push: true});
  };
  const heard = (verdict, grader) => {
    if (grader === null || grader === undefined) return;
    const same = (verdict >= 0.5) === (grader >= 0.5);
    count((now) => ({asked: now.asked + 1, agreed: now.agreed + (same ? 1 : 0)}));
    said.value = same ? 'The grader agrees' : `The grader said ${grader}`;
    setTimeout(() => { said.value = ''; }, 2500);
  };
  return html`<div class="page queue">
    <header class="title"><h1>Queue</h1>
      <form class="line grow" onSubmit=${submit}><label class="sr" for="queued">Which episodes</label><input id="queued" name="contains" class="grow" spellcheck="false" defaultValue=${params.contains} placeholder="a part of an id, run, task, adapter, … as in the list" /><button>Show</button></form>
      <button aria-pressed=${params.unlabelled ? 'true' : 'false'} onClick=${() => put({unlabelled: params.unlabelled ? '' : '1', n: ''})}>Unlabelled</button>
      <button aria-pressed=${pairs ? 'true' : 'false'} onClick=${() => put({pairs: pairs ? '' : '1', n: ''})}>Pairs</button>
      <span class="muted">${!total ? '' : `${Math.min(number + 1, total)} of ${total}`}${tally.asked ? ` · the grader agreed ${tally.agreed} of ${tally.asked} times` : ''}</span></header>
    ${list.error.value ? html`<${Problem} error=${list.error.value} again=${() => list.refresh()} />`
      : total === 0 ? html`<${Empty} title="Nothing to judge">No episode is like that. Leave a filter out.</${Empty}>`
      : total !== null && number >= total ? html`<${Empty} title="That was all">${plural(total, 'episode')} were shown. <button onClick=${() => put({n: ''})}>Begin again</button></${Empty}>`
      : !id ? html`<${Waiting} />`
      : pairs ? html`<${Two} key=${id} id=${id} store=${params.store} next=${() => go(1)} />`
      : html`<${One} key=${id} id=${id} store=${params.store} next=${() => go(1)} heard=${heard} />`}
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

function One({id, store, next, heard}) {
  const answer = useAnswer(header(id, store), {keep: false});
  const [error, send] = useSending();
  const input = useRef(null);
  const verdict = (value) => answer.data && send(() => label(id, {kind: 'verdict', value}, store).then(() => { heard(value, judged(answer.data)); next(); }));
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
