// One task before and after training: two episodes beside each other, or below each other on a narrow page.
import {useMemo} from 'preact/hooks';
import {html} from 'studio/base/html';
import {Shown} from 'studio/base/text';
import {query, useAnswer} from 'studio/base/api';
import {modelOf, useBody} from 'studio/base/episode';
import {plural, policy} from 'studio/base/format';
import {link} from 'studio/base/route';
import {Outcome} from 'studio/parts/episode_row';
import {judged} from 'studio/parts/figures';
import {Body} from 'studio/parts/message';
import {Answer} from 'studio/parts/states';

export const Sample = ({pair: {task, before, after}, store}) => html`<article class="sample">
  <header class="line"><h3><${Shown} text=${task} most=${120} /></h3><a href=${link('c', '', {a: before, b: after, store})}>compare turn by turn</a></header>
  <div class="beside"><${One} id=${before} store=${store} /><${One} id=${after} store=${store} /></div></article>`;

function One({id, store}) {
  const answer = useAnswer(`episodes/${encodeURIComponent(id)}${query({store})}`);
  return html`<div class="one"><${Answer} answer=${answer} rows=${4}>${(header) => html`<${Said} header=${header} store=${store} />`}</${Answer}></div>`;
}

const ROLES = {user: 'Environment', tool: 'Result'};

function Said({header, store}) {
  const model = useMemo(() => modelOf(header), [header]);
  const shown = model.acted.filter((at) => model.of('role')(at) !== 'system');
  return html`<p class="line"><a href=${link('e', header.id, {store})}><b><${Shown} text=${policy(header.policy.adapter, header.policy.version, header.policy.base_model)} most=${80} /></b></a>
      <${Outcome} failure=${header.failure?.kind} stop=${header.stop} value=${judged(header)} /><span class="muted">${header.stop.replaceAll('_', ' ')} after ${plural(header.totals.turns, 'turn')}</span></p>
    ${shown.map((at) => html`<${Message} key=${at} model=${model} at=${at} store=${store} />`)}`;
}

function Message({model, at, store}) {
  const body = useBody(model, at, store, true);
  const role = model.of('role')(at);
  return html`<div class=${`message ${role}`}><span class="sr">${role === 'assistant' ? 'Model' : ROLES[role] ?? role}</span><${Body} body=${body} excerpt=${model.of('text')(at)} kind=${role === 'assistant' ? 'said' : 'code'} most=${8} place=${{id: model.header.id, node: at, store}} /></div>`;
}
