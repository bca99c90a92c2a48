// What evaluations say beside each other: all figures, the comparison of two, several attempts, and what became of each.
import {html} from 'studio/base/html';
import {Shown} from 'studio/base/text';
import {count, fixed, percent} from 'studio/base/format';
import {Trend} from 'studio/parts/trend';

export function Overview({groups = [], comparison}) {
  if (!groups.length) return null;
  const names = [...new Set(groups.flatMap((each) => each.rows.map(([name]) => name)))];
  const cells = groups.map((each) => new Map(each.rows));
  const repeated = groups.some((each) => each.runs.length > 1);
  const several = groups.filter((each) => each.pass_at_k.length > 1);
  return html`
    <${Section} title="Figures"><table class="plain beside-each-other"><tbody>${names.map((name) => html`<tr key=${name}><th scope="row">${name}</th>
      ${cells.map((each, at) => html`<td key=${at} class=${(each.get(name) ?? '').length > 40 ? 'long' : ''}><${Shown} text=${each.get(name) ?? '–'} most=${2000} /></td>`)}</tr>`)}</tbody></table></${Section}>
    ${comparison && html`<${Section} title="Comparison"><table class="plain beside-each-other"><tbody>${comparison.map(([name, said]) => html`<tr key=${name}><th scope="row">${name}</th><td><${Shown} text=${said} most=${2000} /></td></tr>`)}</tbody></table></${Section}>`}
    ${repeated && html`<${Section} title="Runs"><table class="plain"><thead><tr><th>Runs</th><th class="number">Number</th><th class="number">Resolved</th><th class="number">Share</th></tr></thead>
      <tbody>${groups.flatMap((each) => each.runs.map((run) => html`<tr key=${`${each.label} ${run.index}`}><td><${Shown} text=${each.label} most=${120} /></td><td class="number">${run.index}</td><td class="number">${count(run.resolved)} of ${count(run.known)}</td><td class="number">${run.known ? percent(run.resolved / run.known) : '–'}</td></tr>`))}</tbody></table></${Section}>`}
    ${several.length > 0 && html`<section><h2>Several attempts</h2>${several.map((each) => html`<${Attempts} key=${each.label} group=${each} alone=${groups.length === 1} />`)}</section>`}
    <${Section} title="What became of the attempts"><table class="plain"><thead><tr><th>Outcome</th>${groups.map((each) => html`<th key=${each.label}><${Shown} text=${each.label} most=${80} /></th>`)}</tr></thead>
      <tbody>${kinds(groups).map((kind) => html`<tr key=${kind}><td>${kind.replaceAll('_', ' ')}</td>${groups.map((each) => html`<td key=${each.label}><span class="line"><span class="share" aria-hidden="true"><u style=${{transform: `scaleX(${each.kinds[kind] / Math.max(1, each.attempts)})`}}></u></span>${count(each.kinds[kind])} <small class="muted">${percent(each.kinds[kind] / Math.max(1, each.attempts))}</small></span></td>`)}</tr>`)}</tbody></table></${Section}>`;
}

const kinds = (groups) => Object.keys(groups[0].kinds).filter((kind) => groups.some((each) => each.kinds[kind]));

const Section = ({title, children}) => html`<section><h2>${title}</h2><div class="wide" tabindex="0" role="region" aria-label=${title}>${children}</div></section>`;

/** Pass@k is one of k attempts; Best@k the one that a verifier chose of k. */
function Attempts({group, alone}) {
  const named = [['Pass', group.pass_at_k, 'main'], ['Best', group.best_at_k, 'dashed']];
  const known = (found) => found.filter(({estimate}) => typeof estimate.mean === 'number');
  const points = (found) => known(found).map(({k, estimate: {mean, low, high}}) => ({slot: k - 1, value: mean, low, high}));
  return html`${!alone && html`<h3><${Shown} text=${group.label} most=${120} /></h3>`}
    <${Trend} label="Tasks solved by the number of attempts" slots=${group.pass_at_k.map(({k}) => String(k))} series=${named.map(([name, found, kind]) => ({name: `${name}@k, 95 % interval`, kind, points: points(found)}))} />
    <div class="wide" tabindex="0" role="region" aria-label=${`Attempts of ${group.label}`}><table class="plain"><thead><tr><th>Of k attempts</th><th class="number">Share</th><th class="number">95 % interval</th><th class="number">Tasks</th></tr></thead>
      <tbody>${named.flatMap(([name, found]) => known(found).map(({k, estimate: {mean, low, high, n}}) => html`<tr key=${`${name} ${k}`}><td>${name}@${k}</td><td class="number">${fixed(mean, 3)}</td><td class="number">${fixed(low, 3)} to ${fixed(high, 3)}</td><td class="number">${count(n)}</td></tr>`))}</tbody></table></div>`;
}
