// Evaluations: their figures, and each instance with its patch and what the grader said.
import {useMemo} from 'preact/hooks';
import {html} from 'studio/base/html';
import {Shown} from 'studio/base/text';
import {exported, query, row, rowsOf, useAnswer} from 'studio/base/api';
import {count, fixed, percent, seconds, short} from 'studio/base/format';
import {useKeys} from 'studio/base/keys';
import {link, param, put} from 'studio/base/route';
import {Interval} from 'studio/pages/adapters';
import {Patch, Text} from 'studio/parts/message';
import {Rows} from 'studio/parts/rows';
import {Overview} from 'studio/parts/overview';
import {Answer, Empty, Facts, LeftOut} from 'studio/parts/states';

const path = (name) => name.split('/').map(encodeURIComponent).join('/');

export const Evaluations = ({id}) => (id ? html`<${Evaluation} key=${id} id=${id} />` : html`<${List} />`);

function List() {
  const answer = useAnswer('evaluations');
  return html`<div class="page scrolls" tabindex="0"><header class="heading"><h1>Evaluations</h1></header><${Answer} answer=${answer}>${({evaluations, groups, comparison}) => (evaluations.length
    ? html`<div class="wide" tabindex="0" role="region" aria-label="Evaluations"><table class="plain"><thead><tr><th>Evaluation</th><th>Agent and model</th><th class="chart">Pass@1, 95 % interval</th><th class="number">Tasks</th><th class="number">Attempts</th><th class="number">Cost</th></tr></thead>
      <tbody>${evaluations.map(({name, figures, problem}) => html`<tr key=${name}><td><a href=${link('v', name)}><${Shown} text=${name} most=${100} /></a></td>
        ${problem ? html`<td colspan="5" class="bad"><${Shown} text=${problem} /></td>` : html`<td><${Shown} text=${[figures.agent, figures.model].filter(Boolean).join(', ') || '–'} most=${80} /></td><td class="chart"><${Interval} found=${estimate(figures.pass_at_1)} /></td>
        <td class="number">${count(figures.tasks)}</td><td class="number">${count(figures.attempts)}</td><td class="number">${figures.cost ? `$${fixed(figures.cost)}` : '–'}</td>`}</tr>`)}</tbody></table></div>
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
  const rates = (name) => (figures[name]?.of ? [name.replaceAll('_', ' '), `${percent(figures[name].count / figures[name].of)} (${count(figures[name].count)} of ${count(figures[name].of)})`] : [name, null]);
  const atK = (name, found) => (found ?? []).map(({k, estimate: each}) => [`${name}@${k}`, each && typeof each.mean === 'number' ? percent(each.mean) : null]);
  return html`<h2>Figures</h2><${Facts} rows=${[['Agent', figures.agent], ['Model', figures.model], ['Data', [figures.dataset, figures.split].filter(Boolean).join(', ')], ['Limits', figures.in_force],
    ...atK('Pass', figures.pass_at_k), ...atK('Best', figures.best_at_k), ['Reward', figures.reward === null || figures.reward === undefined ? null : fixed(figures.reward, 3)],
    ...['stuck', 'empty_patch', 'timed_out', 'malformed', 'flagged'].map(rates), ['Turns', typeof figures.turns === 'number' ? fixed(figures.turns, 1) : null], ['Seconds', typeof figures.seconds === 'number' ? seconds(figures.seconds) : null]]} />
    <p class="muted">Choose an instance for its patch and log.</p>`;
}

function Instance({name, each}) {
  const answer = useAnswer(`evaluations/${path(name)}${query({instance: each.instance})}`, {keep: false});
  return html`<h2><${Shown} text=${each.instance} most=${120} /></h2>
    <${Facts} rows=${[['Outcome', each.kind.replaceAll('_', ' ')], ['Why', each.reason], ['Stop', each.stop], ['Flags', (each.flags ?? []).join(', ')], ['Reward', each.reward], ['Cost', each.cost ? `$${fixed(each.cost)}` : null],
      ['Episode', each.episode && !exported ? html`<a href=${link('e', each.episode)}>open</a>` : null]]} />
    <${Answer} answer=${answer} rows=${4}>${(found) => html`
      ${found.error && html`<h3>Error</h3><${Text} text=${found.error} kind="code" />`}
      ${found.patch ? html`<h3>Patch</h3><${Patch} text=${found.patch} />` : html`<p class="muted">There is no patch.</p>`}
      ${found.log && html`<h3>Grader</h3><${Text} text=${found.log} kind="code" />`}
      ${(found.files ?? []).map((file) => html`<details key=${file.name}><summary><${Shown} text=${file.name} most=${80} /></summary><${Text} text=${file.text} kind="code" /></details>`)}`}</${Answer}>`;
}
