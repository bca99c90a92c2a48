// The labels of an episode, and the controls that add one.
import {useEffect, useRef, useState} from 'preact/hooks';
import {html} from 'studio/base/html';
import {Shown} from 'studio/base/text';
import {exported} from 'studio/base/api';
import {moment, plural} from 'studio/base/format';
import {useKeys} from 'studio/base/keys';
import {label, words as said} from 'studio/base/labels';
import {param, put} from 'studio/base/route';
import {sampledIn, spanOf, spanText} from 'studio/base/tokens';
import {Problem} from 'studio/parts/states';

/** To where a comment is written. */
export function toRemark() {
  const place = document.getElementById('remark');
  place?.closest('details')?.setAttribute('open', '');
  place?.focus();
}

/** `node` is what comments are about, or of the tokens view the tokens that are selected. */
export function Labels({model, node, store}) {
  const {header} = model;
  const span = param('view') === 'tokens' ? spanOf(param('tokens')) : null;
  const about = sampledIn(span, model) ?? {node};
  const [changed, set] = useState(null);
  const [error, failed] = useState(null);
  const input = useRef(null);
  useEffect(() => set(null), [header]);
  const labels = changed?.id === header.id ? changed.labels : header.labels;
  const add = (fields) => label(header.id, fields, store).then((now) => { set({id: header.id, labels: now}); failed(null); }, failed);
  const comment = (event) => {
    event.preventDefault();
    const text = input.current.value.trim();
    if (!text) return;
    add(text.startsWith('#') ? {kind: 'tag', text: text.slice(1).trim()} : {kind: 'comment', text, ...about}).then(() => { if (input.current) input.current.value = ''; });
    input.current.blur();
  };
  const words = about.tokens ? `Comment on ${plural(about.tokens[1] - about.tokens[0], 'token')}` : 'Comment, or #tag';
  useKeys('Labels', exported ? {} : {
    m: ['comment, or #tag', toRemark],
    Escape: ['', () => document.activeElement?.blur()],
  });
  return html`${labels.length > 0 && html`<ul class="labels">${labels.map((each) => html`<li key=${each.id}>
      <span><b>${each.kind}</b> ${said[each.kind](each)} <${Shown} text=${each.text} most=${2000} />${each.node !== null && html` <${Place} label=${each} prompt=${model.of('prompt_tokens')(each.node)} />`}
      ${' '}<small class="muted"><${Shown} text=${each.author} most=${60} />, ${moment(each.at)}</small></span>
      ${!exported && html`<button class="icon" title="withdraw" aria-label=${`withdraw ${each.kind}`} onClick=${() => add({withdraws: each.id})}>×</button>`}</li>`)}</ul>`}
    ${!exported && html`<div class="line"><button onClick=${() => add({kind: 'verdict', value: 1})}>Good</button><button onClick=${() => add({kind: 'verdict', value: 0})}>Bad</button></div>
      <form class="line comment" onSubmit=${comment}><label class="sr" for="remark">${words}</label><input id="remark" ref=${input} placeholder=${words} autocomplete="off" maxlength="4000" /></form>`}
    ${error && html`<${Problem} error=${error} />`}`;
}

/** What a label is about, and a way there. Labels count sampled tokens; the address counts those of the prompt, too. */
function Place({label: {node, tokens}, prompt}) {
  if (!tokens || prompt === null) return html`<button class="plain small" onClick=${() => put({node, tokens: ''})}>node ${node}</button>`;
  const span = {node, first: prompt + tokens[0], last: prompt + tokens[1] - 1};
  return html`<button class="plain small" onClick=${() => put({view: 'tokens', node, tokens: spanText(span)})}>${plural(tokens[1] - tokens[0], 'token')} of node ${node}</button>`;
}
