// What the episodes found have in common, to choose from. Choosing changes the words of the query, and so the address.
import {useEffect, useMemo, useRef, useState} from 'preact/hooks';
import {html} from 'studio/base/html';
import {Shown} from 'studio/base/text';
import {query, useAnswer} from 'studio/base/api';
import {count, reward} from 'studio/base/format';
import {useLive} from 'studio/base/live';
import {put} from 'studio/base/route';

const BY = {label: 'Label', stop: 'Stop', failed: 'Failure', adapter: 'Adapter', version: 'Version', task: 'Task', run: 'Run', split: 'Split', strategy: 'Strategy', environment: 'Environment', label: 'Label'};
const HEIGHT = 64;

/** The query without the words that begin so, or are just this clause. */
const without = (q, clause) => q.split(clause).join(' ').replace(/\s+/g, ' ').trim();
const has = (q, clause) => ` ${q} `.includes(` ${clause} `);
const search = (q) => put({q, n: ''}, {push: true});

export function Narrow({params}) {
  const answer = useAnswer(`facets${query({store: params.store, q: params.q, by: Object.keys(BY).join(','), most: 8})}`);
  const later = useRef(null);
  // Counting all values anew is dear, and nobody waits for it: once a second, after the rows.
  useLive((events) => {
    if (later.current || !events.some(({kind, ids}) => ids && kind !== 'grew')) return;
    later.current = setTimeout(() => { later.current = null; answer.again(); }, 1000);
  });
  useEffect(() => () => clearTimeout(later.current), []);
  const found = answer.data;
  return html`<aside class="narrow" aria-label="Narrow the list" tabindex="0">
    <details open=${innerWidth > 820}><summary class="sr">Narrow by reward, task, …</summary>
    ${found ? html`<${Rewards} rewards=${found.rewards} q=${params.q} />
      ${Object.entries(BY).filter(([name]) => worth(found.facets[name], params.q)).map(([name, words]) => html`<${Facet} key=${name} words=${words} values=${found.facets[name]} q=${params.q} />`)}`
    : html`<div class="histogram"></div>`}</details>
  </aside>`;
}

/** A facet with one value tells nothing, unless it was chosen. */
const worth = (values, q) => values?.length > 1 || values?.some((each) => has(q, each.query));

function Facet({words, values, q}) {
  return html`<section><h2 class="small">${words}</h2><ul>${values.map(({value, count: found, query: clause}) => html`<li key=${clause}>
    <button class="facet" aria-pressed=${has(q, clause) ? 'true' : 'false'} onClick=${() => search(has(q, clause) ? without(q, clause) : `${q} ${clause}`.trim())}>
      <span>${value === null ? html`<i class="muted">none</i>` : html`<${Shown} text=${String(value).replaceAll('_', ' ')} most=${60} />`}</span><span class="muted">${count(found)}</span></button></li>`)}</ul></section>`;
}

/** How rewards are spread; drawing over it keeps those in between. */
function Rewards({rewards, q}) {
  const {low, high, counts, unknown} = rewards;
  const [brush, drag] = useState(null);
  const chosen = /(?:^|\s)reward:(\S+)/.exec(q)?.[0].trim();
  const most = useMemo(() => Math.max(1, ...(counts ?? [])), [counts]);
  if (!counts?.some(Boolean)) return html`<section><h2 class="small">Reward</h2><p class="muted">None is judged.</p></section>`;
  const share = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    return Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
  };
  const value = (at) => low + (high - low) * at;
  const end = () => {
    if (!brush) return;
    const [from, to] = [Math.min(...brush), Math.max(...brush)];
    const bins = counts.length;
    const clause = `reward:${reward(value(Math.floor(from * bins) / bins)).replace('−', '-')}..${reward(value(Math.ceil(to * bins) / bins)).replace('−', '-')}`;
    drag(null);
    search(`${chosen ? without(q, chosen) : q} ${clause}`.trim());
  };
  const inside = (bin) => !brush || (bin + 1 > Math.min(...brush) * counts.length && bin < Math.max(...brush) * counts.length);
  return html`<section><h2 class="small">Reward${chosen && html` <button class="plain more" onClick=${() => search(without(q, chosen))}>all</button>`}</h2>
    <svg class="histogram" viewBox=${`0 0 ${counts.length * 5} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label=${`Rewards from ${reward(low)} to ${reward(high)}; in the query as reward:0..0.5`}
      onPointerDown=${(event) => { event.currentTarget.setPointerCapture(event.pointerId); drag([share(event), share(event)]); }}
      onPointerMove=${(event) => brush && drag([brush[0], share(event)])} onPointerUp=${end} onPointerCancel=${() => drag(null)}>
      ${counts.map((each, bin) => each > 0 && html`<rect key=${bin} class=${inside(bin) ? 'bin in' : 'bin'} x=${bin * 5} width="4" y=${HEIGHT - Math.max(2, (each / most) * HEIGHT)} height=${Math.max(2, (each / most) * HEIGHT)} />`)}
      ${brush && html`<rect class="brush" x=${Math.min(...brush) * counts.length * 5} width=${Math.abs(brush[1] - brush[0]) * counts.length * 5} y="0" height=${HEIGHT} />`}
    </svg><p class="scale"><span>${reward(low)}</span>${unknown > 0 && html`<span>${count(unknown)} not judged</span>`}<span>${reward(high)}</span></p></section>`;
}
