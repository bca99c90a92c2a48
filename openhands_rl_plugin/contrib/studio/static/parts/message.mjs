// The body of a message: its text, its calls as they would be run, and what came back.
import {useState} from 'preact/hooks';
import {html} from 'studio/base/html';
import {Shown} from 'studio/base/text';
import {diff, hunks} from 'studio/base/diff';
import {more} from 'studio/base/episode';
import {count, plural} from 'studio/base/format';
import {Problem} from 'studio/parts/states';

const LINES = 18;
const CHARACTERS = 2400;

/** A text, cut where it is long. `rest`: the server has more of it, from that character on. */
export function Text({text, kind = '', rest = null, place = null, most = LINES}) {
  const [whole, open] = useState(false);
  const [added, add] = useState({text: '', rest});
  const all = text + added.text;
  const lines = all.split('\n', most + 1);
  const long = lines.length > most || all.length > CHARACTERS;
  const said = whole || !long ? all : lines.slice(0, most).join('\n').slice(0, CHARACTERS);
  const fetchMore = () => more(place.id, place.node, added.rest, place.store).then((found) => add({text: added.text + found.content, rest: found.rest}), () => {});
  return html`<pre class=${`text ${kind}${long && !whole ? ' cut' : ''}`}><${Shown} text=${said} /></pre>
    ${long && html`<button class="more" aria-expanded=${whole ? 'true' : 'false'} onClick=${() => open(!whole)}>${whole ? 'Show less' : `Show all ${count(all.length)} characters`}</button>`}
    ${(whole || !long) && added.rest !== null && place && html`<button class="more" onClick=${fetchMore}>Load more</button>`}`;
}

export function Diff({before, after, around}) {
  return html`<${Lines} lines=${hunks(diff(before.split('\n'), after.split('\n')), around)} />`;
}

/** A patch as git writes it. */
export const Patch = ({text}) => html`<${Lines} lines=${text.split('\n').slice(0, 2000).map((line) => (/^(---|\+\+\+|@@|diff )/.test(line) ? ['@', line] : /^[-+]/.test(line) ? [line[0], line.slice(1)] : [' ', line.slice(1)]))} />`;

const KINDS = {'-': 'gone', '+': 'came', '…': 'skip', '@': 'place', ' ': 'same'};

const Lines = ({lines}) => html`<pre class="diff">${lines.map(([sign, line], at) => html`<span key=${at} class=${KINDS[sign]}>${sign === '…' ? `${plural(line, 'line')} unchanged` : html`<i>${sign === '@' ? ' ' : sign}</i><${Shown} text=${line} />`}${'\n'}</span>`)}</pre>`;

/** The arguments as JSON, or null for what is none. */
function parsed(text) {
  try {
    const value = JSON.parse(text);
    return value && typeof value === 'object' && !Array.isArray(value) ? value : null;
  } catch {
    return null;
  }
}

export function Call({call}) {
  const [raw, show] = useState(false);
  const values = parsed(call.arguments);
  return html`<div class="call">
    <div class="name"><b><${Shown} text=${call.name} most=${200} /></b>
      ${values ? html`<button class="plain" aria-pressed=${raw ? 'true' : 'false'} onClick=${() => show(!raw)}>raw</button>` : html`<span class="bad">no valid JSON</span>`}</div>
    ${raw || !values ? html`<${Text} text=${call.arguments} kind="code" />` : html`<${Arguments} values=${values} />`}
  </div>`;
}

const SHELL = ['command', 'cmd', 'code'];

function Arguments({values}) {
  const {old_str: before, new_str: after, ...others} = values;
  const edit = typeof before === 'string' && typeof after === 'string';
  const names = Object.keys(edit ? others : values);
  if (!edit && names.length === 1 && SHELL.includes(names[0]) && typeof values[names[0]] === 'string') {
    return html`<${Text} text=${values[names[0]]} kind="code shell" />`;
  }
  return html`<dl class="arguments">${names.map((name) => html`<div key=${name}><dt><${Shown} text=${name} most=${100} /></dt>
    <dd><${Text} text=${typeof values[name] === 'string' ? values[name] : JSON.stringify(values[name], null, 1)} kind="code" /></dd></div>`)}</dl>
    ${edit && html`<${Diff} before=${before} after=${after} />`}`;
}

/** `body` of `useBody`; `excerpt` holds its place until it is there. */
export function Body({body, excerpt, kind, place, most}) {
  if (body?.error) return html`<${Problem} error=${body.error} />`;
  if (!body) return excerpt ? html`<pre class=${`text waits ${kind}`}><${Shown} text=${excerpt} /></pre>` : null;
  return html`${body.content ? html`<${Text} text=${body.content} kind=${kind} rest=${body.rest} place=${place} most=${most} />` : null}
    ${(body.calls ?? []).map((call, at) => html`<${Call} key=${at} call=${call} />`)}`;
}
