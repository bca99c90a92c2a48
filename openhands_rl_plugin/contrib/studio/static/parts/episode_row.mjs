// One episode in a line, and the line's head.
import {html} from 'studio/base/html';
import {Shown} from 'studio/base/text';
import {count, policy, reward, seconds, short, when} from 'studio/base/format';
import {mark} from 'studio/base/listing';
import {link, put} from 'studio/base/route';

/** What people labelled and what verifiers say: columns that are there where somebody said something. */
export const OPINIONS = {human: 'Human', verifier: 'Verifier'};

const columns = (said) => [
  ['mark', '', null], ['outcome', 'Reward', 'reward'], ...said.map((name) => [`number said ${name}`, OPINIONS[name], null]), ['task', 'Task', null], ['policy', 'Policy', null], ['strategy', 'Strategy', null],
  ['stop', 'Stop', null], ['number turns', 'Turns', 'turns'], ['number tokens', 'Tokens', 'tokens'], ['number seconds', 'Time', 'seconds'], ['number when', 'Finished', 'finished'],
];

/** The judged reward, or else what the environment paid. */
export const earned = (row) => row.reward ?? row.return;

/** A reward as a number and a bar; a failed or running episode says so instead. */
export function Outcome({failure, stop, value}) {
  if (failure) return html`<span class="bad" title=${`failed: ${failure}`}>✕ ${failure}</span>`;
  if (stop === 'unfinished') return html`<span class="running" title="still running, or its process has died"><i></i>running</span>`;
  const share = value === null || value === undefined ? 0 : Math.max(0, Math.min(1, value));
  return html`<span class="reward" title=${value === null || value === undefined ? 'not judged' : `reward ${value}`}>
    <b>${reward(value)}</b><i aria-hidden="true"><u style=${{transform: `scaleX(${share})`}}></u></i></span>`;
}

/** Heads sort, where the server can. */
export function HEAD(sort, said = []) {
  const [by, up] = sort.startsWith('-') ? [sort.slice(1), false] : [sort, true];
  const next = (name) => put({sort: by === name ? (up ? '' : name) : `-${name}`, n: ''});
  return html`<div class="row head" role="row">${columns(said).map(([kind, words, name]) => html`
    <span key=${kind} class=${kind} role="columnheader" aria-sort=${name && by === name ? (up ? 'ascending' : 'descending') : null}>
      ${name ? html`<button class="plain" onClick=${() => next(name)}>${words}${by === name ? (up ? ' ↑' : ' ↓') : ''}</button>` : words || html`<span class="sr">Marked</span>`}</span>`)}</div>`;
}

export function EpisodeRow({number, row, style, params, here, chosen, said = []}) {
  if (!row) return html`<div class="row" role="row" aria-rowindex=${number + 1} style=${style}><span role="cell" class="bone w1"></span></div>`;
  const address = link('e', row.id, {...params, n: number});
  return html`<div class=${`row${here ? ' here' : ''}${chosen ? ' chosen' : ''}`} role="row" aria-rowindex=${number + 1} aria-current=${here ? 'true' : null} style=${style}>
    <span class="mark" role="cell"><input type="checkbox" checked=${chosen} aria-label=${`mark ${row.id}`} onChange=${() => mark(row.id)} /></span>
    <span class="outcome" role="cell"><${Outcome} failure=${row.failed} stop=${row.stop} value=${earned(row)} /></span>
    ${said.map((name) => html`<span key=${name} class=${`number said ${name}`} role="cell" title=${name === 'human' ? 'what labellers said, no reward' : 'what a verifier thinks, no reward'}>${reward(row[name])}</span>`)}
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
