// The labels of an episode, and the controls that add one.
import {useRef, useState} from 'preact/hooks';
import {html} from 'studio/base/html';
import {Shown} from 'studio/base/text';
import {exported} from 'studio/base/api';
import {moment} from 'studio/base/format';
import {useKeys} from 'studio/base/keys';
import {label, words} from 'studio/base/labels';
import {Problem} from 'studio/parts/states';

export function Labels({header, node, store}) {
  const [changed, set] = useState(null);
  const [error, failed] = useState(null);
  const input = useRef(null);
  const labels = changed?.id === header.id ? changed.labels : header.labels;
  const add = (fields) => label(header.id, fields, store).then((now) => { set({id: header.id, labels: now}); failed(null); }, failed);
  const comment = (event) => {
    event.preventDefault();
    const text = input.current.value.trim();
    if (!text) return;
    add(text.startsWith('#') ? {kind: 'tag', text: text.slice(1).trim()} : {kind: 'comment', text, node}).then(() => { if (input.current) input.current.value = ''; });
    input.current.blur();
  };
  useKeys('Labels', exported ? {} : {
    m: ['comment, or #tag', () => { const place = input.current; place?.closest('details')?.setAttribute('open', ''); place?.focus(); }],
    Escape: ['', () => document.activeElement?.blur()],
  });
  return html`${labels.length > 0 && html`<ul class="labels">${labels.map((each) => html`<li key=${each.id}>
      <span><b>${each.kind}</b> ${words[each.kind](each)} <${Shown} text=${each.text} most=${2000} />${each.node !== null && html` <small class="muted">node ${each.node}</small>`}
      <small class="muted"><${Shown} text=${each.author} most=${60} />, ${moment(each.at)}</small></span>
      ${!exported && html`<button class="icon" title="withdraw" aria-label=${`withdraw ${each.kind}`} onClick=${() => add({withdraws: each.id})}>×</button>`}</li>`)}</ul>`}
    ${!exported && html`<div class="line"><button onClick=${() => add({kind: 'verdict', value: 1})}>Good</button><button onClick=${() => add({kind: 'verdict', value: 0})}>Bad</button></div>
      <form class="line comment" onSubmit=${comment}><label class="sr" for="remark">Comment or #tag</label><input id="remark" ref=${input} placeholder="Comment, or #tag" autocomplete="off" maxlength="4000" /></form>`}
    ${error && html`<${Problem} error=${error} />`}`;
}
