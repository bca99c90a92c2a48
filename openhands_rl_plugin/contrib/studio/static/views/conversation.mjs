// The messages as the model saw and wrote them; a call and its result are one thing.
import {useEffect, useLayoutEffect, useRef, useState} from 'preact/hooks';
import {html} from 'studio/base/html';
import {Shown} from 'studio/base/text';
import {useBody} from 'studio/base/episode';
import {count, fixed, reward} from 'studio/base/format';
import {Body} from 'studio/parts/message';
import {Empty} from 'studio/parts/states';
import {Windowed} from 'studio/parts/windowed';

export function Conversation({model, node, choose, store}) {
  const at = model.items.findIndex((item) => item.node === node || item.answers.includes(node));
  if (!model.items.length) return html`<${Empty} title="Nothing was said">The episode has no messages${model.header.failure ? '; it failed before the first one' : ' yet'}.</${Empty}>`;
  return html`<div class="conversation" role="region" aria-label="Conversation">
    <${Windowed} items=${model.items} guess=${180} at=${at}>${(item, number) => html`
      <${Item} key=${item.node} model=${model} item=${item} here=${number === at} choose=${choose} store=${store} />`}</${Windowed}>
  </div>`;
}

const ROLES = {system: 'System', user: 'User', assistant: 'Model', tool: 'Result'};

function Item({model, item, here, choose, store}) {
  const {of} = model;
  const at = item.node;
  const place = useRef(null);
  const near = useNear(place);
  const body = useBody(model, at, store, near);
  useLayoutEffect(() => { if (here) place.current.scrollIntoView({block: 'nearest'}); }, [here]);
  const role = of('role')(at);
  const calls = of('calls')(at);
  return html`
    ${item.begins && html`<div class="segment"><b>Segment ${item.segment}</b> <span><${Shown} text=${of('cause')(at) ?? 'the prompt does not extend the turn before'} /></span></div>`}
    <article ref=${place} class=${`item ${role}${here ? ' here' : ''}`} id=${`node-${at}`} aria-label=${`${ROLES[role]} ${of('turn')(at) ?? ''}`} aria-current=${here ? 'true' : null} onClick=${() => choose(at)}>
      <div class="side"><b>${of('kind')(at) ?? ROLES[role]}</b>${of('turn')(at) !== null && role === 'assistant' && html`<span>turn ${of('turn')(at)}</span>`}</div>
      <div class="main">
        <${Body} body=${body} excerpt=${of('text')(at)} kind=${role === 'assistant' ? 'said' : ''} place=${{id: model.header.id, node: at, store}} />
        ${item.answers.map((answer) => html`<${Result} key=${answer} model=${model} at=${answer} near=${near} store=${store} />`)}
        ${role === 'assistant' && html`<${Figures} of=${of} at=${at} siblings=${model.children[of('parent')(at)]?.length ?? 1} calls=${calls} />`}
      </div>
    </article>`;
}

function Result({model, at, near, store}) {
  const body = useBody(model, at, store, near);
  return html`<div class="result" id=${`node-${at}`}><span class="sr">Result</span><${Body} body=${body} excerpt=${model.of('text')(at)} kind="code" place=${{id: model.header.id, node: at, store}} /></div>`;
}

function Figures({of, at, siblings}) {
  const paid = of('reward')(at);
  const parts = [
    paid !== null && html`<span class=${paid > 0 ? 'good' : ''}>reward ${reward(paid)}${of('simulated')(at) ? ' (fork)' : ''}</span>`,
    of('sampled_tokens')(at) !== null && html`<span>${count(of('sampled_tokens')(at))} tokens</span>`,
    of('logprob')(at) !== null && html`<span title="mean logprob of the sampled tokens, in nats">logprob ${fixed(of('logprob')(at))}</span>`,
    of('value')(at) !== null && html`<span>value ${fixed(of('value')(at))}</span>`,
    siblings > 1 && html`<span>1 of ${siblings} answers</span>`,
    of('policy')(at) && html`<span>by <${Shown} text=${of('policy')(at)} /></span>`,
    of('finish')(at) === 'length' && html`<span class="bad">cut at the length limit</span>`,
    of('lacks')(at) && html`<span class="bad" title=${of('lacks')(at).join('; ')}>not trainable</span>`,
  ].filter(Boolean);
  return parts.length ? html`<div class="figures">${parts}</div>` : null;
}

/** Whether something is or was near the view. */
function useNear(place) {
  const [near, set] = useState(false);
  useEffect(() => {
    if (near) return undefined;
    const watch = new IntersectionObserver((seen) => seen.at(-1).isIntersecting && set(true), {rootMargin: '600px 0px'});
    watch.observe(place.current);
    return () => watch.disconnect();
  }, [near]);
  return near;
}
