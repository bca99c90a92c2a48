// Where a prompt does not extend the turn before: what differs, why, what it costs, and the setting that cures it.
import {useEffect} from 'preact/hooks';
import {html} from 'studio/base/html';
import {Shown} from 'studio/base/text';
import {query, useAnswer} from 'studio/base/api';
import {count, plural} from 'studio/base/format';
import {useKeys} from 'studio/base/keys';
import {put} from 'studio/base/route';
import {Answer, Empty} from 'studio/parts/states';

export function Breaks({model, node, choose, store}) {
  const answer = useAnswer(`episodes/${encodeURIComponent(model.header.id)}/breaks${query({store})}`, {keep: false});
  const breaks = answer.data?.breaks ?? [];
  const at = breaks.findIndex((each) => each.node === node);
  const jump = (by) => breaks.length && choose(breaks[(at + by + breaks.length) % breaks.length].node);
  useKeys('Breaks', {n: ['next break', () => jump(1)], N: ['previous break', () => jump(at < 0 ? 0 : -1)]});
  return html`<${Answer} answer=${answer}>${(found) => (found.total === 0
    ? html`<${Empty} title=${model.nodes.prompt_tokens ? 'Every prompt extends the turn before' : 'No token ids were recorded'}>
        ${model.nodes.prompt_tokens ? 'The episode is trained as one segment, and no token is processed twice.' : 'So nobody can tell where a prompt was rendered differently.'}</${Empty}>`
    : html`<div class="breaks">
        <p class="strip"><b>${plural(found.total, 'break')}</b><span class="muted">${count(found.repeated)} tokens were processed again</span></p>
        ${found.tokenizer && !breaks.some((each) => each.before?.text) && html`<p class="note">Ids are shown: ${found.tokenizer}.</p>`}
        ${breaks.map((each) => html`<${Break} key=${each.node} found=${each} model=${model} here=${each.node === node} choose=${choose} />`)}
        ${found.total > breaks.length && html`<p class="note">${count(found.total - breaks.length)} more are not shown.</p>`}
      </div>`)}</${Answer}>`;
}

function Break({found, model, here, choose}) {
  useEffect(() => { if (here) document.getElementById(`break-${found.node}`)?.scrollIntoView({block: 'nearest'}); }, [here]);
  const {before, removed, inserted, after} = found;
  return html`<article id=${`break-${found.node}`} class=${`break${here ? ' here' : ''}`} aria-current=${here ? 'true' : null}>
    <header><h2><button class="plain" onClick=${() => choose(found.node)}><${Shown} text=${found.words} /></button></h2>
      <span class="muted">turn ${model.of('turn')(found.node) ?? '–'}</span>
      <span>${plural(found.repeated, 'token')} again</span>
      ${found.turns > 0 && html`<span>${plural(found.turns, 'turn')} lost</span>`}
      ${found.starts_segment && html`<span>a new segment</span>`}</header>
    <p class="said diffed"><${Part} part=${before} /><del><${Part} part=${removed} /></del><ins><${Part} part=${inserted} /></ins><${Part} part=${after} /></p>
    <p class="muted">${found.rewritten ? 'The history was rewritten.' : `From token ${count(found.at)} of ${count(found.context)} on.`}${found.meets === false ? ' From there on nothing is the same.' : ''}</p>
    ${found.setting && html`<p class="cure"><b>Cure</b> <${Shown} text=${found.setting} /></p>`}
    <p><button onClick=${() => { choose(found.node); put({view: 'conversation', node: found.node}, {push: true}); }}>Show the turn</button></p>
  </article>`;
}

/** A run of tokens as text, or as ids where no tokenizer knows them. */
function Part({part}) {
  if (!part?.count) return null;
  const left = part.count - part.ids.length;
  return html`<span><${Shown} text=${part.text ?? `${part.ids.join(' ')} `} />${left > 0 && html`<small class="muted"> … ${plural(left, 'token')} more </small>`}</span>`;
}
