// The list of keys, and short messages to the user.
import {useEffect, useRef} from 'preact/hooks';
import {signal} from '@preact/signals';
import {html} from 'studio/base/html';
import {help} from 'studio/base/keys';

export const helpShown = signal(false);
/** What the studio says in its lower corner; screen readers read it too. */
export const said = signal('');

/** A dialog that is on the page while `open`; Escape closes it. */
export function Dialog({open, close, label, children}) {
  const place = useRef(null);
  useEffect(() => {
    if (open && !place.current.open) place.current.showModal();
    else if (!open && place.current?.open) place.current.close();
  }, [open]);
  return html`<dialog ref=${place} aria-label=${label} onClose=${close} onClick=${(event) => event.target === place.current && close()}>
    ${open && html`<div class="dialog"><header><h2>${label}</h2><button class="icon" aria-label="Close" onClick=${close}>×</button></header>${children}</div>`}
  </dialog>`;
}

const NAMES = {ArrowUp: '↑', ArrowDown: '↓', ArrowLeft: '←', ArrowRight: '→', Escape: 'Esc', Enter: '↵', ' ': 'space'};

export function Help() {
  return html`<${Dialog} open=${helpShown.value} close=${() => { helpShown.value = false; }} label="Keys">
    <div class="keys">${help().map(([section, rows]) => html`<section key=${section}><h3>${section}</h3>
      <dl>${rows.map(([key, what]) => html`<div key=${key}><dt>${key.split(' ').filter(Boolean).map((each) => html`<kbd>${NAMES[each] ?? each}</kbd>`)}${key === ' ' && html`<kbd>space</kbd>`}</dt><dd>${what}</dd></div>`)}</dl></section>`)}</div>
  </${Dialog}>`;
}
