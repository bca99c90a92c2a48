// Texts of models and environments are hostile: whatever turns, hides or moves text becomes visible here.
import {options} from 'preact';
import {html} from 'studio/base/html';

// C0 and C1 controls but tab and line feed, marks and overrides of direction, zero-width and invisible characters.
const ACTING = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
const ANY = new RegExp(ACTING.source);

const escaped = (character) => {
  const code = character.charCodeAt(0);
  return code < 0x100 ? `\\x${code.toString(16).padStart(2, '0')}` : `\\u${code.toString(16).padStart(4, '0')}`;
};

/** The text with every character that would act on a page written out. */
export const plain = (text) => (ANY.test(text) ? text.replace(ACTING, escaped) : text);

// What terminals colour by. Backgrounds and concealment could hide a text, so those say nothing here.
const SGR = /\u001b\[([0-9;]{0,40})m/;
const HUES = ['dim', 'bad', 'good', 'amber', 'blue', 'violet', 'teal', ''];

/** The style after a code: `{hue, bold}`. */
function coloured({hue, bold}, code) {
  const numbers = code.split(';').map(Number);
  for (let at = 0; at < numbers.length; at += 1) {
    const each = numbers[at];
    if (each === 0) [hue, bold] = ['', false];
    else if (each === 1) bold = true;
    else if (each === 22) bold = false;
    else if (each === 39) hue = '';
    else if (each >= 30 && each <= 37) hue = HUES[each - 30];
    else if (each >= 90 && each <= 97) hue = HUES[each - 90];
    else if (each === 38 || each === 48) at += numbers[at + 1] === 5 ? 2 : numbers[at + 1] === 2 ? 4 : 0;
  }
  return {hue, bold};
}

/** The same as nodes: colours of a terminal are colours, and what was written out stands apart from what was there. */
export function Shown({text, most = Infinity}) {
  const whole = String(text ?? '');
  const said = whole.length > most ? `${whole.slice(0, most)}…` : whole;
  if (!ANY.test(said)) return said;
  if (!SGR.test(said)) return written(said);
  const [first, ...others] = said.split(SGR);
  const parts = [written(first)];
  let style = {hue: '', bold: false};
  for (let at = 0; at < others.length; at += 2) {
    style = coloured(style, others[at]);
    const part = written(others[at + 1]);
    const kind = `${style.hue && `ansi ${style.hue}`}${style.bold ? ' strong' : ''}`.trim();
    parts.push(kind && others[at + 1] ? html`<span class=${kind}>${part}</span>` : part);
  }
  return parts;
}

function written(said) {
  const parts = [];
  let from = 0;
  for (const match of said.matchAll(ACTING)) {
    if (match.index > from) parts.push(said.slice(from, match.index));
    // A carriage return before a line feed is how some systems end lines, and tells nothing.
    if (match[0] !== '\r' || said[match.index + 1] !== '\n') parts.push(html`<span class="acting">${escaped(match[0])}</span>`);
    from = match.index + 1;
  }
  parts.push(said.slice(from));
  return parts;
}

// So that no page can forget it: every text node and every attribute that is read goes through `plain`.
const READ = ['title', 'aria-label', 'placeholder', 'alt'];
const before = options.vnode;
options.vnode = (vnode) => {
  if (vnode.type === null && typeof vnode.props === 'string') vnode.props = plain(vnode.props);
  else if (typeof vnode.type === 'string') {
    for (const name of READ) if (typeof vnode.props[name] === 'string') vnode.props[name] = plain(vnode.props[name]);
  }
  before?.(vnode);
};
