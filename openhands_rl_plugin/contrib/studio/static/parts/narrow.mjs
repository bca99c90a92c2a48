// What the episodes found have in common, to choose from. Choosing changes the address.
import {useEffect, useMemo, useRef, useState} from 'preact/hooks';
import {html} from 'studio/base/html';
import {Shown} from 'studio/base/text';
import {query, useAnswer} from 'studio/base/api';
import {count, reward} from 'studio/base/format';
import {useLive} from 'studio/base/live';
import {put} from 'studio/base/route';

const BY = {stop: 'Stop', failure: 'Failure', adapter: 'Adapter', version: 'Version', task: 'Task', run: 'Run', split: 'Split', strategy: 'Strategy', environment: 'Environment'};
const HEIGHT = 64;

const narrow = (params) => put({...params, n: ''}, {push: true});

export function Narrow({store, chosen}) {
  const answer = useAnswer(`facets${query({store, ...chosen})}`);
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
    ${found ? html`<${Rewards} rewards=${found.rewards} bounded=${chosen.min_reward || chosen.max_reward} />
      ${Object.entries(BY).filter(([name]) => chosen[name] || found.facets[name].length > 1).map(([name, words]) => html`<${Facet} key=${name} name=${name} words=${words} values=${found.facets[name].slice(0, 8)} now=${chosen[name]} />`)}`
    : html`<div class="histogram"></div>`}</details>
  </aside>`;
}

function Facet({name, words, values, now}) {
  return html`<section><h2 class="small">${words}</h2><ul>${values.map(({value, count: found}) => html`<li key=${value}>
    <button class="facet" aria-pressed=${value === now ? 'true' : 'false'} onClick=${() => narrow({[name]: value === now ? '' : value})}>
      <span><${Shown} text=${value.replaceAll('_', ' ')} most=${60} /></span><span class="muted">${count(found)}</span></button></li>`)}</ul></section>`;
}

/** How rewards are spread; drawing over it keeps those in between. */
function Rewards({rewards, bounded}) {
  const {low, high, counts, unknown} = rewards;
  const [brush, drag] = useState(null);
  const most = useMemo(() => Math.max(1, ...counts), [counts]);
  if (!counts.length) return html`<section><h2 class="small">Reward</h2><p class="muted">None is judged.</p></section>`;
  const share = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    return Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
  };
  const value = (at) => String(Number((low + (high - low) * at).toPrecision(6)));
  const end = () => {
    if (!brush) return;
    const [from, to] = [Math.min(...brush), Math.max(...brush)];
    const bins = counts.length;
    drag(null);
    narrow({min_reward: value(Math.floor(from * bins) / bins), max_reward: value(Math.ceil(to * bins) / bins)});
  };
  const inside = (bin) => !brush || (bin + 1 > Math.min(...brush) * counts.length && bin < Math.max(...brush) * counts.length);
  return html`<section><h2 class="small">Reward${bounded && html` <button class="plain more" onClick=${() => narrow({min_reward: '', max_reward: ''})}>all</button>`}</h2>
    <svg class="histogram" viewBox=${`0 0 ${counts.length * 5} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label=${`Rewards from ${reward(low)} to ${reward(high)}`}
      onPointerDown=${(event) => { event.currentTarget.setPointerCapture(event.pointerId); drag([share(event), share(event)]); }}
      onPointerMove=${(event) => brush && drag([brush[0], share(event)])} onPointerUp=${end} onPointerCancel=${() => drag(null)}>
      ${counts.map((each, bin) => each > 0 && html`<rect key=${bin} class=${inside(bin) ? 'bin in' : 'bin'} x=${bin * 5} width="4" y=${HEIGHT - Math.max(2, (each / most) * HEIGHT)} height=${Math.max(2, (each / most) * HEIGHT)} />`)}
      ${brush && html`<rect class="brush" x=${Math.min(...brush) * counts.length * 5} width=${Math.abs(brush[1] - brush[0]) * counts.length * 5} y="0" height=${HEIGHT} />`}
    </svg><p class="scale"><span>${reward(low)}</span>${unknown > 0 && html`<span>${count(unknown)} not judged</span>`}<span>${reward(high)}</span></p></section>`;
}
