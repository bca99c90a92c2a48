// What is known of an episode and of the node that is selected, in numbers.
import {html} from 'studio/base/html';
import {Shown} from 'studio/base/text';
import {count, fixed, moment, policy, reward, seconds} from 'studio/base/format';
import {link} from 'studio/base/route';
import {Labels} from 'studio/parts/labelling';
import {Patch, Text} from 'studio/parts/message';
import {Facts} from 'studio/parts/states';

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
