// Versions of adapters: what each was made from, and how it does on held-out tasks.
import {html} from 'studio/base/html';
import {Shown} from 'studio/base/text';
import {useAnswer} from 'studio/base/api';
import {count, fixed, percent, plural, when} from 'studio/base/format';
import {useLive} from 'studio/base/live';
import {link, param} from 'studio/base/route';
import {Answer, Empty} from 'studio/parts/states';

export function Adapters() {
  const answer = useAnswer('adapters');
  useLive((events) => events.some(({kind}) => ['stage', 'scored', 'reset'].includes(kind)) && answer.again());
  return html`<div class="page scrolls" tabindex="0"><header class="heading"><h1>Adapters</h1></header><${Answer} answer=${answer}>${({folders}) => (folders.some((each) => each.adapters.length)
    ? folders.map((each) => html`<${Folder} key=${each.name} folder=${each} />`)
    : html`<${Empty} title="No adapters are open">Start the studio with a folder of adapters, or with a run: <code>openhands-rl studio ./my-run</code></${Empty}>`)}</${Answer}></div>`;
}

/** Children below their parents; only a second child of the same parent moves to the right. */
function lineage(adapters) {
  const names = new Set(adapters.map((each) => each.name));
  const below = Map.groupBy(adapters, (each) => (names.has(each.parent) ? each.parent : null));
  const lines = [];
  const add = (each, depth) => {
    lines.push({...each, depth});
    const [first, ...others] = [...(below.get(each.name) ?? [])].sort((a, b) => a.version - b.version);
    for (const other of others) add(other, depth + 1);
    if (first) add(first, depth);
  };
  for (const root of below.get(null) ?? []) add(root, 0);
  return lines;
}

const FIRST = ['reward', 'loss', 'approx_kl', 'entropy'];

function Folder({folder}) {
  const lines = lineage(folder.adapters);
  const known = [...new Set(lines.flatMap((each) => Object.keys(each.metrics ?? {})))];
  const keys = [...FIRST.filter((key) => known.includes(key)), ...known.filter((key) => !FIRST.includes(key))].slice(0, 3);
  const before = Object.fromEntries(lines.map((each) => [each.name, each]));
  return html`<section><h2><${Shown} text=${folder.name} most=${100} /></h2><div class="wide" tabindex="0" role="region" aria-label=${folder.name}><table class="plain lineage">
    <thead><tr><th>Version</th><th>Made from</th><th class="chart">Held-out success, 95 % interval</th><th class="number">Tokens spent</th><th class="number">Step</th>${keys.map((key) => html`<th key=${key} class="number">${key.replaceAll('_', ' ')}</th>`)}<th title="first digits of the weights' sha256">Weights</th><th>Loaded</th><th class="number">Probe difference</th><th class="number">Made</th></tr></thead>
    <tbody>${lines.map((each) => html`<${Version} key=${each.name} each=${each} keys=${keys} parent=${before[each.parent]} />`)}</tbody></table></div></section>`;
}

function Version({each, keys, parent}) {
  const name = html`<span class="indent" style=${{width: `${each.depth * 16}px`}}></span><a href=${link('', '', {adapter: each.adapter, version: each.version, store: param('store')})}><b><${Shown} text=${each.name} most=${80} /></b></a>${each.current && html` <span class="chip good">current</span>`}`;
  if (each.problem) return html`<tr><td>${name}</td><td colspan=${keys.length + 8} class="bad"><${Shown} text=${each.problem} /></td></tr>`;
  return html`<tr><td>${name}</td><td><${Shown} text=${each.parent ?? each.base_model ?? '–'} most=${60} />${parent && html` <a class="also" href=${link('c', '', {of: 'sets', a: `${parent.adapter}@${parent.version}`, b: `${each.adapter}@${each.version}`, store: param('store')})}>compare</a>`}</td>
    <td class="chart"><${Interval} found=${each.held_out} /></td><td class="number"><${Spent} found=${each.spent} /></td><td class="number">${count(each.step)}</td>
    ${keys.map((key) => html`<td key=${key} class="number">${typeof each.metrics?.[key] === 'number' ? fixed(each.metrics[key], 3) : '–'}</td>`)}
    <td><code>${each.sha256?.slice(0, 12) ?? '–'}</code></td><td>${each.loaded?.length ? each.loaded.map((url) => html`<small key=${url}><${Shown} text=${url} most=${60} /></small> `) : html`<span class="muted">${each.probe ? 'no, has a probe' : 'no'}</span>`}</td><td class="number"><${Probed} found=${each.probed} /></td><td class="number">${when(each.made)}</td></tr>`;
}

/** What the version's episodes took in the stores that are open. */
function Spent({found}) {
  if (!found) return html`<span class="muted">–</span>`;
  return html`<span title=${`${plural(found.episodes, 'episode')}: ${count(found.prompt)} tokens of prompts, ${count(found.completion)} sampled`}>${count(found.prompt + found.completion)}</span>`;
}

/** The largest of the servers' differences from the trainer's logprobs, when the version was published. */
function Probed({found}) {
  const worst = Object.entries(found ?? {}).sort((a, b) => b[1] - a[1])[0];
  if (!worst) return html`<span class="muted">–</span>`;
  return html`<span title=${`nats on average, at ${worst[0]}`}>${fixed(worst[1], 4)}</span>`;
}

/** A mean and its interval on a scale from 0 to 1, with the numbers beside it. */
export function Interval({found}) {
  if (!found) return html`<span class="muted">not measured</span>`;
  const {mean, low, high, n} = found;
  return html`<span class="interval" title=${`${n} tasks`}><svg viewBox="0 0 100 12" preserveAspectRatio="none" aria-hidden="true"><line class="axis" x1="0" x2="100" y1="6" y2="6" />
    ${low !== null && html`<line class="spread" x1=${low * 100} x2=${high * 100} y1="6" y2="6" />`}<rect x=${mean * 100 - 1} width="2" y="1" height="10" /></svg>
    <b>${percent(mean)}</b> <small class="muted">${low === null ? '' : `${percent(low)} to ${percent(high)}, `}n ${count(n)}</small></span>`;
}
