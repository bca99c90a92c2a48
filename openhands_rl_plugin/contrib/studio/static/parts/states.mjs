// What is shown instead of what was wanted: nothing there, an error, or not there yet.
import {html} from 'studio/base/html';
import {Shown} from 'studio/base/text';
import data from 'studio/data';

export const Empty = ({title, children}) => html`<section class="empty"><h2>${title}</h2>${children && html`<div>${children}</div>`}</section>`;

/** An error with its cause; the server's messages name the remedy. */
export const Problem = ({error, again}) => html`<section class="problem" role="alert">
  <p><${Shown} text=${error.message} /></p>${again && html`<button onClick=${again}>Try again</button>`}</section>`;

/** The place that the content will take, so that nothing moves when it comes. */
export const Waiting = ({rows = 6}) => html`<div class="waiting" aria-busy="true" aria-label="Loading">
  ${Array.from({length: rows}, (_, at) => html`<div key=${at} class=${`bone w${at % 3}`}></div>`)}</div>`;

/** `answer` of `useAnswer`: the children get its data when it is there. */
export function Answer({answer, rows, children}) {
  if (answer.error && !answer.data) return html`<${Problem} error=${answer.error} again=${answer.again} />`;
  if (!answer.data) return html`<${Waiting} rows=${rows} />`;
  return html`${answer.error && html`<${Problem} error=${answer.error} again=${answer.again} />`}${children(answer.data)}`;
}

/** Terms with their values; what is unknown is left out. */
export const Facts = ({rows}) => html`<dl class="facts">${rows.filter(([, value]) => value !== null && value !== undefined && value !== '')
  .map(([name, value, hint]) => html`<div key=${name} title=${hint} class=${typeof value === 'string' && value.length > 60 ? 'long' : null}><dt>${name}</dt><dd>${typeof value === 'string' ? html`<${Shown} text=${value} />` : value}</dd></div>`)}</dl>`;

/** What a file of bounded size had no room for. */
export const LeftOut = () => (data?.export.left_out?.length ? html`<p class="muted">Left out, so that this file stays small: <${Shown} text=${data.export.left_out.join('; ')} />.</p>` : null);
