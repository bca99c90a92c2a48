// All samples of one task as a tree of turns: together as long as they are the same, then apart.
import {useMemo, useState} from 'preact/hooks';
import {html} from 'studio/base/html';
import {Shown} from 'studio/base/text';
import {cell, query, row, rowsOf, useAnswer} from 'studio/base/api';
import {fixed, plural, policy, reward} from 'studio/base/format';
import {useKeys} from 'studio/base/keys';
import {go, link, param} from 'studio/base/route';
import {Outcome} from 'studio/parts/episode_row';
import {Rows} from 'studio/parts/rows';
import {Answer, Empty} from 'studio/parts/states';

const HEIGHT = 30;

export function Group({id}) {
  const store = param('store');
  const answer = useAnswer(`groups/${id.split('/').map(encodeURIComponent).join('/')}${query({store})}`, {keep: false});
  return html`<div class="page group"><${Answer} answer=${answer} rows=${12}>${(group) => (rowsOf(group.samples)
    ? html`<${Opened} group=${group} store=${store} />` : html`<${Empty} title="No samples">No store has an episode of this group.</${Empty}>`)}</${Answer}></div>`;
}

function Opened({group, store}) {
  const lines = useMemo(() => linesOf(group), [group]);
  const [at, set] = useState(0);
  const open = (line) => line && go(link('e', line.episode, {node: line.node, store}));
  useKeys('Group', {
    j: ['next line', () => set(Math.min(at + 1, lines.length - 1))], k: ['previous line', () => set(Math.max(at - 1, 0))],
    ArrowDown: ['', () => set(Math.min(at + 1, lines.length - 1))], ArrowUp: ['', () => set(Math.max(at - 1, 0))],
    n: ['next difference', () => set(Math.max(0, lines.findIndex((each, number) => number > at && each.forks)))],
    Enter: ['open the episode there', () => open(lines[at])],
  });
  const shown = rowsOf(group.samples);
  return html`
    <header class="title"><h1><${Shown} text=${group.task.id} most=${120} /></h1>
      <span>${plural(group.total, 'sample')}${group.total > shown ? `, ${shown} shown` : ''}</span>
      ${group.signal ? html`<span class="chip good">signal</span>` : html`<span class="chip" title="GRPO learns from differences within a group">no signal: all rewards are equal</span>`}
      <p class="muted id"><${Shown} text=${group.id} most=${120} /></p></header>
    <div class="columns">
      <section class="middle" aria-label="Turns"><${Rows} total=${lines.length} height=${HEIGHT} at=${at} label="Turns of all samples">
        ${(number, style) => html`<${Line} key=${number} line=${lines[number]} here=${number === at} style=${style} store=${store} total=${shown} />`}</${Rows}></section>
      <aside class="right" aria-label="Samples" tabindex="0"><${Samples} samples=${group.samples} store=${store} /></aside>
    </div>`;
}

/** The tree as lines, from above to below; only a fork moves them to the right. */
function linesOf(group) {
  const {turns, samples} = group;
  const total = rowsOf(turns);
  const children = Array.from({length: total}, () => []);
  const roots = [];
  for (let at = 0; at < total; at += 1) (cell(turns, 'parent', at) === null ? roots : children[turns.parent[at]]).push(at);
  const lines = [];
  const add = (at, depth) => {
    for (let now = at; now !== null;) {
      const below = children[now];
      const here = cell(turns, 'samples', now) ?? [];
      const ended = here.filter((each) => !below.some((child) => turns.samples[child].includes(each)));
      const forks = below.length + ended.length > 1;
      const calls = cell(turns, 'calls', now);
      lines.push({depth, role: turns.role[now], text: cell(turns, 'text', now) ?? '', calls: calls?.join(', '), samples: here.length, forks, episode: samples.id[here[0]], node: turns.nodes[now][0]});
      for (const each of ended) lines.push({depth: depth + (forks ? 1 : 0), leaf: row(samples, each), episode: samples.id[each], node: ''});
      if (below.length !== 1 || forks) {
        for (const child of below) add(child, depth + 1);
        now = null;
      } else [now] = below;
    }
  };
  for (const root of roots) add(root, 0);
  return lines;
}

const DEEPEST = 14;

function Line({line, here, style, store, total}) {
  const indent = html`<span class="indent" style=${{width: `${Math.min(line.depth, DEEPEST) * 16}px`}} aria-hidden="true">${Array.from({length: Math.min(line.depth, DEEPEST)}, (_, n) => html`<i key=${n}></i>`)}</span>`;
  if (line.leaf) {
    const {leaf} = line;
    return html`<div class=${`twig leaf${here ? ' here' : ''}`} role="row" style=${style}><span role="cell">${indent}<a href=${link('e', leaf.id, {store})}><${Shown} text=${leaf.id} most=${80} /></a>
      <${Outcome} failure=${leaf.failed} stop=${leaf.stop} value=${leaf.reward} /><${Advantage} value=${leaf.advantage} /></span></div>`;
  }
  return html`<div class=${`twig ${line.role === 'assistant' ? 'said' : 'heard'}${here ? ' here' : ''}${line.forks ? ' forks' : ''}`} role="row" style=${style}><span role="cell">${indent}
    <span class="share" title=${`${line.samples} of ${total} samples`}><u style=${{transform: `scaleX(${line.samples / total})`}}></u></span>
    <small class="muted role">${line.role === 'assistant' ? 'model' : line.role}</small>
    <a href=${link('e', line.episode, {node: line.node, store})}>${line.calls && html`<b><${Shown} text=${line.calls} most=${60} /></b> `}<${Shown} text=${line.text.replace(/\s+/g, ' ')} most=${160} /></a></span></div>`;
}

export function Advantage({value}) {
  if (value === null || value === undefined) return null;
  return html`<span class=${`advantage ${value < 0 ? 'bad' : value > 0 ? 'good' : 'muted'}`} title="GRPO's advantage">${value > 0 ? '+' : ''}${fixed(value)}</span>`;
}

function Samples({samples, store}) {
  const order = Array.from({length: rowsOf(samples)}, (_, at) => row(samples, at)).sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  return html`<h2>Samples</h2><ul class="samples">${order.map((each) => html`<li key=${each.id}>
    <a href=${link('e', each.id, {store})}><${Shown} text=${each.id} most=${60} /></a>
    <span class="line"><${Outcome} failure=${each.failed} stop=${each.stop} value=${each.reward} /><${Advantage} value=${each.advantage} />
    <small class="muted">${plural(each.turns ?? 0, 'turn')}, <${Shown} text=${policy(each.adapter, each.version, 'base')} /></small></span></li>`)}</ul>
    ${order.length > 1 && html`<p><a class="button" href=${link('c', '', {a: order[0].id, b: order.at(-1).id, store})}>Compare best and worst</a></p>`}
    <p class="muted">${reward(order[0]?.reward)} is the best reward. The advantage is GRPO’s, of the rewards that are known now.</p>`;
}
