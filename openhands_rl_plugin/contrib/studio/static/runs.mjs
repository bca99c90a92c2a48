// The pages of runs, adapters and evaluations.
import {useEffect, useMemo, useRef, useState} from 'preact/hooks';
import {Shown, ask, count, exported, fixed, html, link, param, percent, plural, put, query, row, rowsOf, seconds, short, useAnswer, useKeys, useLive, when} from 'studio/base';
import {About, Answer, Curve, Empty, Facts, LeftOut, Outcome, Overview, Patch, Problem, Rows, Sample, Success, Text, earned} from 'studio/parts';
export function Adapters() {
  const answer = useAnswer('adapters');
  useLive((events) => events.some(({kind}) => kind !== 'open') && answer.again());
  return html`<div class="page scrolls" tabindex="0"><header class="heading"><h1>Adapters</h1></header><${Answer} answer=${answer}>${({folders}) => (folders.some((each) => each.adapters.length)
    ? folders.map((each) => html`<${Folder} key=${each.name} folder=${each} />`)
    : html`<${Empty} title="No adapters are open">Start the studio with a folder of adapters, or with a run: <code>openhands-rl studio ./my-run</code></${Empty}>`)}</${Answer}></div>`;
}

/** Children below their parents; only a second child of the same parent moves to the right. */
function lineage(adapters) {
  const names = new Set(adapters.map((each) => each.name));
  const below = Map.groupBy(adapters, (each) => (names.has(each.parent) ? each.parent : null));
  const lines = [];
  const add = (each, depth) => {
    lines.push({...each, depth});
    const [first, ...others] = [...(below.get(each.name) ?? [])].sort((a, b) => a.version - b.version);
    for (const other of others) add(other, depth + 1);
    if (first) add(first, depth);
  };
  for (const root of below.get(null) ?? []) add(root, 0);
  return lines;
}
const FIRST = ['reward', 'loss', 'approx_kl', 'entropy'];

function Folder({folder}) {
  const lines = lineage(folder.adapters);
  const known = [...new Set(lines.flatMap((each) => Object.keys(each.metrics ?? {})))];
  const keys = [...FIRST.filter((key) => known.includes(key)), ...known.filter((key) => !FIRST.includes(key))].slice(0, 3);
  return html`<section><h2><${Shown} text=${folder.name} most=${100} /></h2><div class="wide" tabindex="0" role="region" aria-label=${folder.name}><table class="plain lineage">
    <thead><tr><th>Version</th><th>Made from</th><th class="chart">Held-out success, 95 % interval</th><th class="number">Step</th>${keys.map((key) => html`<th key=${key} class="number">${key.replaceAll('_', ' ')}</th>`)}<th title="first digits of the weights' sha256">Weights</th><th>Loaded</th><th class="number">Probe difference</th><th class="number">Made</th></tr></thead>
    <tbody>${lines.map((each) => html`<${Version} key=${each.name} each=${each} keys=${keys} />`)}</tbody></table></div></section>`;
}

function Version({each, keys}) {
  const name = html`<span class="indent" style=${{width: `${each.depth * 16}px`}}></span><a href=${link('', '', {adapter: each.adapter, version: each.version, store: param('store')})}><b><${Shown} text=${each.name} most=${80} /></b></a>${each.current && html` <span class="chip good">current</span>`}`;
  if (each.problem) return html`<tr><td>${name}</td><td colspan=${keys.length + 7} class="bad"><${Shown} text=${each.problem} /></td></tr>`;
  return html`<tr><td>${name}</td><td><${Shown} text=${each.parent ?? each.base_model ?? '–'} most=${60} /></td>
    <td class="chart"><${Interval} found=${each.held_out} /></td><td class="number">${count(each.step)}</td>
    ${keys.map((key) => html`<td key=${key} class="number">${typeof each.metrics?.[key] === 'number' ? fixed(each.metrics[key], 3) : '–'}</td>`)}
    <td><code>${each.sha256?.slice(0, 12) ?? '–'}</code></td><td>${each.loaded?.length ? each.loaded.map((url) => html`<small key=${url}><${Shown} text=${url} most=${60} /></small> `) : html`<span class="muted">${each.probe ? 'no, has a probe' : 'no'}</span>`}</td><td class="number"><${Probed} found=${each.probed} /></td><td class="number">${when(each.made)}</td></tr>`;
}

/** The largest of the servers' differences from the trainer's logprobs, when the version was published. */
function Probed({found}) {
  const worst = Object.entries(found ?? {}).sort((a, b) => b[1] - a[1])[0];
  if (!worst) return html`<span class="muted">–</span>`;
  return html`<span title=${`nats on average, at ${worst[0]}`}>${fixed(worst[1], 4)}</span>`;
}

/** A mean and its interval on a scale from 0 to 1, with the numbers beside it. */
export function Interval({found}) {
  if (!found) return html`<span class="muted">not measured</span>`;
  const {mean, low, high, n} = found;
  return html`<span class="interval" title=${`${n} tasks`}><svg viewBox="0 0 100 12" preserveAspectRatio="none" aria-hidden="true"><line class="axis" x1="0" x2="100" y1="6" y2="6" />
    ${low !== null && html`<line class="spread" x1=${low * 100} x2=${high * 100} y1="6" y2="6" />`}<rect x=${mean * 100 - 1} width="2" y="1" height="10" /></svg>
    <b>${percent(mean)}</b> <small class="muted">${low === null ? '' : `${percent(low)} to ${percent(high)}, `}n ${count(n)}</small></span>`;
}
export const Runs = ({id}) => (id ? html`<${Run} key=${id} id=${id} />` : html`<${RunList} />`);

function RunList() {
  const answer = useAnswer('runs');
  useLive((events) => events.some(({kind}) => kind === 'run') && answer.again());
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
  return html`<div class="page scrolls run" tabindex="0"><${Answer} answer=${runs} rows=${10}>${() => html`<${OpenedRun} name=${found.name} />`}</${Answer}></div>`;
}


function OpenedRun({name}) {
  const answer = useAnswer(`runs/${path(name)}`);
  useLive((events) => events.some((each) => each.kind === 'run' && each.name === name) && answer.again());
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
const FIRST_FIGURES = ['success', 'reward', 'episodes', 'failed', 'turns'];

function Stages({records, run}) {
  const keys = useMemo(() => {
    const all = [...new Set(records.flatMap((each) => Object.keys(each.metrics)))];
    return [...FIRST_FIGURES.filter((key) => all.includes(key)), ...all.filter((key) => !FIRST_FIGURES.includes(key))].slice(0, 7);
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
  useLive((events) => events.some((each) => each.kind === 'run' && each.name === name) && again());
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
  useLive((events) => { if (events.some(({kind}) => kind === 'changed')) { newest.again(); facets.again(); } });
  if (!newest.data?.total) return null;
  const failed = facets.data?.facets.failure ?? [];
  return html`<section><header class="line"><h2>Episodes</h2><a href=${link('', '', {contains: run, store})}>${plural(newest.data.total, 'episode')}</a>
      ${failed.map((each) => html`<a key=${each.value} class="bad" href=${link('', '', {contains: run, failure: each.value, store})}>${count(each.count)} ${each.value}</a>`)}</header>
    <ul class="cards">${Array.from({length: rowsOf(newest.data.rows)}, (_, at) => row(newest.data.rows, at)).map((each) => html`<li key=${each.id}><a href=${link('e', each.id, {contains: run, store})}>
      <b><${Shown} text=${each.task} most=${40} /></b><${Outcome} failure=${each.failed} stop=${each.stop} value=${earned(each)} /><small class="muted">${plural(each.turns ?? 0, 'turn')}, ${when(each.finished)}</small></a></li>`)}</ul></section>`;
}
const path = (name) => name.split('/').map(encodeURIComponent).join('/');
export const Evaluations = ({id}) => (id ? html`<${Evaluation} key=${id} id=${id} />` : html`<${List} />`);

function List() {
  const answer = useAnswer('evaluations');
  return html`<div class="page scrolls" tabindex="0"><header class="heading"><h1>Evaluations</h1></header><${Answer} answer=${answer}>${({evaluations, groups, comparison}) => (evaluations.length
    ? html`<div class="wide" tabindex="0" role="region" aria-label="Evaluations"><table class="plain"><thead><tr><th>Evaluation</th><th>Agent and model</th><th class="chart">Pass@1, 95 % interval</th><th class="number">Tasks</th><th class="number">Attempts</th></tr></thead>
      <tbody>${evaluations.map(({name, figures, problem}) => html`<tr key=${name}><td><a href=${link('v', name)}><${Shown} text=${name} most=${100} /></a></td>
        ${problem ? html`<td colspan="4" class="bad"><${Shown} text=${problem} /></td>` : html`<td><${Shown} text=${[figures.agent, figures.model].filter(Boolean).join(', ') || '–'} most=${80} /></td><td class="chart"><${Interval} found=${estimate(figures.pass_at_1)} /></td>
        <td class="number">${count(figures.tasks)}</td><td class="number">${count(figures.attempts)}</td>`}</tr>`)}</tbody></table></div>
      <${Overview} groups=${groups} comparison=${comparison} /><${LeftOut} />`
    : html`<${Empty} title="No evaluation is open">Start the studio with the folder of one: <code>openhands-rl studio ./evaluation</code></${Empty}>`)}</${Answer}></div>`;
}
const estimate = (found) => (found && typeof found.mean === 'number' ? {mean: found.mean, low: found.low ?? null, high: found.high ?? null, n: found.n ?? null} : null);

function Evaluation({id}) {
  const answer = useAnswer(`evaluations/${path(id)}`);
  return html`<div class="page evaluation"><${Answer} answer=${answer} rows=${12}>${(found) => html`<${Opened} found=${found} />`}</${Answer}></div>`;
}
const GOOD = new Set(['resolved']);

function Opened({found}) {
  const {figures, instances} = found;
  const kind = param('kind');
  const chosen = param('instance');
  const all = useMemo(() => Array.from({length: rowsOf(instances)}, (_, at) => row(instances, at)), [instances]);
  const shown = useMemo(() => (kind ? all.filter((each) => each.kind === kind) : all), [all, kind]);
  const at = shown.findIndex((each) => each.instance === chosen);
  const step = (by) => shown.length && put({instance: shown[Math.max(0, Math.min(shown.length - 1, at + by))].instance});
  useKeys('Evaluation', {j: ['next instance', () => step(1)], k: ['previous instance', () => step(-1)], ArrowDown: ['', () => step(1)], ArrowUp: ['', () => step(-1)]});
  const draw = (number, style) => {
    const each = shown[number];
    return html`<div class=${`row instances${number === at ? ' here' : ''}`} role="row" key=${number} style=${style} aria-current=${number === at ? 'true' : null}>
      <span role="cell"><button class="plain" onClick=${() => put({instance: each.instance})}><${Shown} text=${each.instance} most=${120} /></button></span>
      <span role="cell" class=${GOOD.has(each.kind) ? 'good' : each.kind === 'unresolved' ? '' : 'bad'}>${GOOD.has(each.kind) ? '✓' : '✕'} ${each.kind.replaceAll('_', ' ')}</span>
      <span role="cell" class="number">${count(each.turns)}</span><span role="cell" class="number tokens">${short(each.tokens)}</span><span role="cell" class="number seconds">${seconds(each.seconds)}</span></div>`;
  };
  return html`<header class="title"><h1><${Shown} text=${found.name} most=${100} /></h1><${Interval} found=${estimate(figures.pass_at_1)} />
      <span class="group" role="group" aria-label="Outcomes"><button aria-pressed=${kind ? 'false' : 'true'} onClick=${() => put({kind: ''})}>all ${count(all.length)}</button>
        ${Object.entries(figures.kinds ?? {}).filter(([, number]) => number).map(([name, number]) => html`<button key=${name} aria-pressed=${kind === name ? 'true' : 'false'} onClick=${() => put({kind: name})}>${name.replaceAll('_', ' ')} ${count(number)}</button>`)}</span></header>
    <div class="columns"><section class="middle"><${Rows} total=${shown.length} height=${34} at=${at < 0 ? null : at} label="Instances" head=${html`<div class="row head instances" role="row">${['Instance', 'Outcome', 'Turns', 'Tokens', 'Time'].map((each) => html`<span key=${each} role="columnheader" class=${each === 'Instance' || each === 'Outcome' ? '' : `number ${each === 'Time' ? 'seconds' : each.toLowerCase()}`}>${each}</span>`)}</div>`}>${draw}</${Rows}></section>
      <aside class="right wider" aria-label="Details" tabindex="0">${at >= 0 ? html`<${Instance} name=${found.name} each=${shown[at]} />` : html`<${Overall} figures=${figures} />`}</aside></div>`;
}

function Overall({figures}) {
  const atK = (name, found) => (found ?? []).map(({k, estimate: each}) => [`${name}@${k}`, each && typeof each.mean === 'number' ? percent(each.mean) : null]);
  return html`<h2>Figures</h2><${Facts} rows=${[['Agent', figures.agent], ['Model', figures.model], ['Data', [figures.dataset, figures.split].filter(Boolean).join(', ')],
    ...atK('Pass', figures.pass_at_k), ['Reward', figures.reward === null || figures.reward === undefined ? null : fixed(figures.reward, 3)],
    ['Flagged', count(figures.flagged ?? 0)], ['Turns', typeof figures.turns === 'number' ? fixed(figures.turns, 1) : null], ['Seconds', typeof figures.seconds === 'number' ? seconds(figures.seconds) : null]]} />
    <p class="muted">Choose an instance for its patch and log.</p>`;
}

function Instance({name, each}) {
  const answer = useAnswer(`evaluations/${path(name)}${query({instance: each.instance})}`, {keep: false});
  return html`<h2><${Shown} text=${each.instance} most=${120} /></h2>
    <${Facts} rows=${[['Outcome', each.kind.replaceAll('_', ' ')], ['Why', each.reason], ['Stop', each.stop], ['Flags', (each.flags ?? []).join(', ')], ['Reward', each.reward],
      ['Episode', each.episode && !exported ? html`<a href=${link('e', each.episode)}>open</a>` : null]]} />
    <${Answer} answer=${answer} rows=${4}>${(found) => html`
      ${found.error && html`<h3>Error</h3><${Text} text=${found.error} kind="code" />`}
      ${found.patch ? html`<h3>Patch</h3><${Patch} text=${found.patch} />` : html`<p class="muted">There is no patch.</p>`}
      ${found.log && html`<h3>Grader</h3><${Text} text=${found.log} kind="code" />`}
      ${(found.files ?? []).map((file) => html`<details key=${file.name}><summary><${Shown} text=${file.name} most=${80} /></summary><${Text} text=${file.text} kind="code" /></details>`)}`}</${Answer}>`;
}
