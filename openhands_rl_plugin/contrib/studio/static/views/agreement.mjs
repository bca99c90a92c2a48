// How far the people who labelled the same episodes agree, and the episodes on which they do not.
import {html} from 'studio/base/html';
import {Shown} from 'studio/base/text';
import {cell, query, rowsOf, useAnswer} from 'studio/base/api';
import {count, fixed, percent, plural, reward} from 'studio/base/format';
import {useLive} from 'studio/base/live';
import {link} from 'studio/base/route';
import {Answer, Empty, Facts} from 'studio/parts/states';

export function Agreement({q, store}) {
  const answer = useAnswer(`agreement${query({q, store})}`);
  useLive((events) => events.some(({kind}) => kind === 'label' || kind === 'reset') && answer.again());
  return html`<${Answer} answer=${answer}>${(found) => html`<div class="view agreement" tabindex="0" role="region" aria-label="Agreement">
    ${found.episodes ? html`<${Facts} rows=${[
      ['Judged by several', plural(found.episodes, 'episode')],
      ['All agree', `${count(found.agree)} (${percent(found.share)})`],
      ['Cohen’s kappa', found.kappa === null ? 'not defined: all said the same' : fixed(found.kappa), 'agreement beyond chance: 1 always, 0 as by chance; of more than two people the mean over pairs'],
    ]} /><${Pairs} pairs=${found.pairs} /><${Disputed} found=${found} store=${store} />`
    : html`<${Empty} title="Nobody to compare yet">No episode was judged by more than one person. Label as somebody else: <code>openhands-rl label STORE --second-opinion --author NAME</code>, or <code>studio --author NAME</code>.</${Empty}>`}
    ${rowsOf(found.labellers) > 0 && html`<${Labellers} labellers=${found.labellers} />`}</div>`}</${Answer}>`;
}

const each = (table, row) => Array.from({length: rowsOf(table)}, (_, at) => row(at));
const name = (text) => html`<${Shown} text=${text || 'nobody by name'} most=${80} />`;

const Pairs = ({pairs}) => html`<section><h2>Pairs</h2><div class="wide" tabindex="0" role="region" aria-label="Pairs of labellers"><table class="plain">
  <thead><tr><th>Labellers</th><th class="number">Both judged</th><th class="number">Agree</th><th class="number">Kappa</th></tr></thead>
  <tbody>${each(pairs, (at) => html`<tr key=${at}><td>${name(pairs.first[at])} and ${name(pairs.second[at])}</td><td class="number">${count(pairs.episodes[at])}</td>
    <td class="number">${count(pairs.agree[at])} (${percent(pairs.agree[at] / pairs.episodes[at])})</td><td class="number">${fixed(cell(pairs, 'kappa', at))}</td></tr>`)}</tbody></table></div></section>`;

const Labellers = ({labellers}) => html`<section><h2>Labellers</h2><div class="wide" tabindex="0" role="region" aria-label="Labellers"><table class="plain">
  <thead><tr><th>Name</th><th class="number">Judged</th></tr></thead>
  <tbody>${each(labellers, (at) => html`<tr key=${at}><td>${name(labellers.name[at])}</td><td class="number">${count(labellers.episodes[at])}</td></tr>`)}</tbody></table></div></section>`;

function Disputed({found, store}) {
  if (!found.total) return null;
  const {disputed} = found;
  return html`<section><h2>Disputed</h2><p class="muted">${plural(found.total, 'episode')}${found.total > rowsOf(disputed) ? `, the first ${count(rowsOf(disputed))} are here` : ''}. No score follows where no more than half say the same. <a href=${link('q', '', {query: 'label:disputed', store})}>Look at them again</a></p>
    <div class="wide" tabindex="0" role="region" aria-label="Disputed episodes"><table class="plain disputed"><thead><tr><th>Episode</th><th>Verdicts</th></tr></thead>
    <tbody>${each(disputed, (at) => html`<tr key=${disputed.id[at]}><td><a href=${link('e', disputed.id[at], {store})}><${Shown} text=${disputed.id[at]} most=${80} /></a></td>
      <td>${Object.entries(disputed.said[at]).map(([who, value], n) => html`${n > 0 && ', '}${name(who)}: ${reward(value)}`)}</td></tr>`)}</tbody></table></div></section>`;
}
