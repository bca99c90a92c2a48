// What a run was started with and on, and what its evaluations say.
import {useMemo} from 'preact/hooks';
import {html} from 'studio/base/html';
import {Shown} from 'studio/base/text';
import {count, fixed, moment, seconds} from 'studio/base/format';
import {Facts} from 'studio/parts/states';
import {Trend} from 'studio/parts/trend';

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
