// Loops and trainings: their stages, their curves, and their episodes while they are played.
import {useEffect, useMemo, useRef, useState} from 'preact/hooks';
import {html} from 'studio/base/html';
import {Shown} from 'studio/base/text';
import {ask, exported, query, row, rowsOf, useAnswer} from 'studio/base/api';
import {count, fixed, plural, seconds, when} from 'studio/base/format';
import {useLive} from 'studio/base/live';
import {link, param, put} from 'studio/base/route';
import {Curve} from 'studio/parts/chart';
import {Outcome, earned} from 'studio/parts/episode_row';
import {About, Success} from 'studio/parts/run_facts';
import {Sample} from 'studio/parts/sample';
import {Answer, Empty, Facts, LeftOut, Problem} from 'studio/parts/states';

export const Runs = ({id}) => (id ? html`<${Run} key=${id} id=${id} />` : html`<${List} />`);

function List() {
  const answer = useAnswer('runs');
  useLive((events) => events.some(({kind}) => kind === 'stage') && answer.again());
  return html`<div class="page scrolls" tabindex="0"><header class="heading"><h1>Runs</h1></header><${Answer} answer=${answer}>${({runs}) => (runs.length
    ? html`<table class="plain"><thead><tr><th>Run</th><th>Last stage</th><th class="number">Stages</th><th>Adapter</th><th class="number">Time</th><th class="number">Last change</th></tr></thead>
      <tbody>${runs.map((each) => html`<tr key=${each.name}><td><a href=${link('r', each.name)}><${Shown} text=${each.name} most=${100} /></a> <small class="muted">${each.kind}</small></td>
        ${each.problem ? html`<td colspan="5" class="bad"><${Shown} text=${each.problem} /></td>` : html`<td><${Shown} text=${each.stage ?? '–'} /></td><td class="number">${count(each.stages)}</td><td><${Shown} text=${each.adapter ?? '–'} /></td>
        <td class="number">${each.started && each.finished ? seconds(each.finished - each.started) : '–'}</td><td class="number">${when(each.finished)}</td>`}</tr>`)}</tbody></table>`
    : html`<${Empty} title="No run is open">Start the studio with the folder of one: <code>openhands-rl studio ./my-run</code></${Empty}>`)}</${Answer}></div>`;
}

/** A run's name; or the id that an episode has, which begins with its run's. */
function Run({id}) {
  const runs = useAnswer('runs');
  const found = runs.data?.runs.find((each) => each.name === id) ?? runs.data?.runs.find((each) => each.run && (id === each.run || id.startsWith(`${each.run}/`)));
  if (runs.data && !found) {
    return html`<${Empty} title="This run’s folder is not open">The studio was not started with it. <a href=${link('', '', {contains: id, store: param('store')})}>Its episodes</a> are there.</${Empty}>`;
  }
  return html`<div class="page scrolls run" tabindex="0"><${Answer} answer=${runs} rows=${10}>${() => html`<${Opened} name=${found.name} />`}</${Answer}></div>`;
}


function Opened({name}) {
  const answer = useAnswer(`runs/${path(name)}`);
  useLive((events) => events.some(({kind, run}) => kind === 'stage' && run === name) && answer.again());
  return html`<${Answer} answer=${answer} rows=${10}>${(run) => html`
    <header class="heading"><h1><${Shown} text=${name} most=${100} /></h1><p class="muted">${[run.facts?.title || run.kind, run.stage ? `after ${run.stage}` : 'before its first stage'].filter(Boolean).join(' · ')}</p></header>
    ${run.problem && html`<${Problem} error=${{message: run.problem}} />`}
    <${About} run=${run} />
    <${Success} run=${run} />
    ${run.run && !exported && html`<${Stream} run=${run.run} />`}
    <${Curves} name=${name} files=${run.metrics ?? []} records=${run.records ?? []} />
    ${run.records?.length > 0 && html`<${Stages} records=${run.records} run=${run.run} />`}
    ${run.facts?.samples.length > 0 && html`<section><h2>Before and after: the tasks with the largest gain</h2>${run.facts.samples.map((pair) => html`<${Sample} key=${pair.task} pair=${pair} store=${param('store')} />`)}</section>`}
    ${run.options && Object.keys(run.options).length > 0 && html`<details><summary>Options</summary><${Facts} rows=${Object.entries(run.options).map(([key, value]) => [key, typeof value === 'string' ? value : JSON.stringify(value)])} /></details>`}
    <${LeftOut} />`}</${Answer}>`;
}

const path = (name) => name.split('/').map(encodeURIComponent).join('/');

const FIRST = ['success', 'reward', 'episodes', 'failed', 'turns'];

function Stages({records, run}) {
  const keys = useMemo(() => {
    const all = [...new Set(records.flatMap((each) => Object.keys(each.metrics)))];
    return [...FIRST.filter((key) => all.includes(key)), ...all.filter((key) => !FIRST.includes(key))].slice(0, 7);
  }, [records]);
  return html`<section><h2>Stages</h2><div class="wide" tabindex="0" role="region" aria-label="Stages"><table class="plain"><thead><tr><th>Stage</th><th>Adapter</th><th class="number">Time</th>${keys.map((key) => html`<th key=${key} class="number">${key.replaceAll('_', ' ')}</th>`)}</tr></thead>
    <tbody>${[...records].reverse().map((each) => html`<tr key=${each.name}><td>${run && !exported ? html`<a href=${link('', '', {run: `${run}/${each.name}`})}><${Shown} text=${each.name} /></a>` : html`<${Shown} text=${each.name} />`}</td><td><${Shown} text=${each.adapter ?? 'base'} /></td>
      <td class="number">${seconds(each.finished - each.started)}</td>${keys.map((key) => html`<td key=${key} class="number">${figure(each.metrics[key])}</td>`)}</tr>`)}</tbody></table></div></section>`;
}

const figure = (value) => (typeof value === 'number' ? (Number.isInteger(value) ? count(value) : fixed(value, 3)) : value === null || value === undefined ? '–' : String(value).slice(0, 40));

const MOST = 9;
const STEPS = ['step', 'global_step', 'epoch'];

const BY_STAGE = 'by stage';
/** Of a whole run the means of its stages say more than the steps of the last one. */
const LAST = 'evaluate-final';

function Curves({name, files, records}) {
  const trained = useMemo(() => records.filter(({metrics}) => typeof metrics.loss === 'number'), [records]);
  const choices = [...(trained.length > 1 ? [BY_STAGE] : []), ...files];
  const wanted = param('file');
  const usual = choices[0] === BY_STAGE && (exported || records.at(-1).name === LAST) ? BY_STAGE : choices.at(-1);
  const file = choices.includes(wanted) ? wanted : usual;
  if (!file) return null;
  return html`<section><header class="line"><h2>Curves</h2>
      ${choices.length > 1 && html`<select aria-label="File of metrics" value=${file} onChange=${(event) => put({file: event.target.value})}>${choices.map((each) => html`<option key=${each} value=${each}>${each.replace(/\/?metrics\.jsonl$/, '')}</option>`)}</select>`}
      ${file === BY_STAGE && html`<span class="muted">from ${trained[0].name} to ${trained.at(-1).name}</span>`}</header>
    ${file === BY_STAGE ? html`<${ByStage} records=${trained} />` : html`<${OfFile} key=${file} name=${name} file=${file} />`}</section>`;
}

function ByStage({records}) {
  const keys = [...new Set(records.flatMap(({metrics}) => Object.keys(metrics)))].sort((a, b) => CURVES.indexOf(b) - CURVES.indexOf(a));
  const x = useMemo(() => records.map((_, at) => at), [records]);
  const rows = useMemo(() => Object.fromEntries(keys.map((key) => [key, records.map(({metrics}) => metrics[key] ?? null)])), [records]);
  return html`<${Drawn} x=${x} keys=${keys} rows=${rows} names=${records.map((each) => each.name)} />`;
}

/** What is looked at first, the most important one at the end. */
const CURVES = ['tokens_per_second', 'seconds', 'turns', 'clip_share', 'grad_norm', 'entropy', 'approx_kl', 'reward', 'loss'];

function OfFile({name, file}) {
  const {rows, keys, error, again} = useMetrics(name, file);
  useLive((events) => events.some((each) => each.kind === 'metric' && each.run === name && each.file === file) && again());
  const step = STEPS.find((key) => keys.includes(key));
  const total = rowsOf(rows);
  const x = useMemo(() => (step ? rows[step] : Array.from({length: total}, (_, at) => at)), [rows]);
  return html`<p class="muted">${plural(total, 'point')}</p>${error && html`<${Problem} error=${error} />`}
    <${Drawn} x=${x} keys=${keys.filter((key) => !STEPS.includes(key))} rows=${rows} />`;
}

function Drawn({x, keys, rows, names}) {
  const [all, showAll] = useState(false);
  const drawn = keys.filter((key) => (rows[key] ?? []).some((each) => each !== null));
  return html`<div class="curves">${(all ? drawn : drawn.slice(0, MOST)).map((key) => html`<${Curve} key=${key} name=${key} x=${x} y=${rows[key]} names=${names} />`)}</div>
    ${drawn.length > MOST && html`<button class="more" onClick=${() => showAll(!all)}>${all ? 'Fewer curves' : `All ${drawn.length} curves`}</button>`}`;
}

/** The rows of a file of metrics. Later ones are added to what is there; a file that began anew is read anew. */
function useMetrics(name, file) {
  const [state, set] = useState({rows: {}, keys: [], error: null, file: null});
  const after = useRef({file, place: 0});
  const busy = useRef(false);
  const read = async () => {
    if (busy.current) return;
    busy.current = true;
    try {
      if (after.current.file !== file) after.current = {file, place: 0};
      const found = await ask(`runs/${path(name)}/metrics${query({file, after: after.current.place})}`, {fresh: true});
      const anew = found.from < after.current.place || after.current.place === 0;
      after.current = {file, place: found.after};
      set((before) => ({file, error: null, keys: [...new Set([...(anew ? [] : before.keys), ...found.keys])], rows: anew ? found.rows : joined(before.rows, found.rows)}));
    } catch (error) {
      set((before) => ({...before, error}));
    } finally {
      busy.current = false;
    }
  };
  useEffect(() => { read(); }, [name, file]);
  return {...state, again: read};
}

function joined(before, added) {
  const [old, more] = [rowsOf(before), rowsOf(added)];
  return Object.fromEntries([...new Set([...Object.keys(before), ...Object.keys(added)])].map((key) => [
    key, [...(before[key] ?? Array(old).fill(null)), ...(added[key] ?? Array(more).fill(null))]]));
}

/** The newest episodes of a run, and what went wrong in it. */
function Stream({run}) {
  const store = param('store');
  const newest = useAnswer(`episodes${query({contains: run, store, limit: 12})}`);
  const facets = useAnswer(`facets${query({contains: run, store})}`);
  useLive((events) => { if (events.some(({ids}) => ids)) { newest.again(); facets.again(); } });
  if (!newest.data?.total) return null;
  const failed = facets.data?.facets.failure ?? [];
  return html`<section><header class="line"><h2>Episodes</h2><a href=${link('', '', {contains: run, store})}>${plural(newest.data.total, 'episode')}</a>
      ${failed.map((each) => html`<a key=${each.value} class="bad" href=${link('', '', {contains: run, failure: each.value, store})}>${count(each.count)} ${each.value}</a>`)}</header>
    <ul class="cards">${Array.from({length: rowsOf(newest.data.rows)}, (_, at) => row(newest.data.rows, at)).map((each) => html`<li key=${each.id}><a href=${link('e', each.id, {contains: run, store})}>
      <b><${Shown} text=${each.task} most=${40} /></b><${Outcome} failure=${each.failed} stop=${each.stop} value=${earned(each)} /><small class="muted">${plural(each.turns ?? 0, 'turn')}, ${when(each.finished)}</small></a></li>`)}</ul></section>`;
}
