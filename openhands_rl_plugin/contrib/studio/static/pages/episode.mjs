// One episode: neighbours of the list on the left, a view of it in the middle, figures on the right.
import {useEffect, useMemo} from 'preact/hooks';
import {html} from 'studio/base/html';
import {Shown} from 'studio/base/text';
import {useAnswer, query} from 'studio/base/api';
import {modelOf, siblings} from 'studio/base/episode';
import {useKeys} from 'studio/base/keys';
import {useLive} from 'studio/base/live';
import {listing, mark, marked} from 'studio/base/listing';
import {filters, go, link, param, put} from 'studio/base/route';
import {Outcome} from 'studio/parts/episode_row';
import {Figures, judged} from 'studio/parts/figures';
import {Neighbours} from 'studio/parts/neighbours';
import {Answer} from 'studio/parts/states';
import {VIEWS} from 'studio/views';

export function Episode({id}) {
  const store = param('store');
  const answer = useAnswer(`episodes/${encodeURIComponent(id)}${query({store})}`, {keep: false});
  const context = {store, sort: param('sort'), ...filters()};
  useSteps(id, context);
  // An episode that is being played grows on the page.
  useLive((events) => events.some(({kind, ids}) => kind === 'reset' || ids?.includes(id)) && answer.again());
  return html`<div class="page episode">
    <${Neighbours} id=${id} context=${context} />
    <${Answer} answer=${answer} rows=${12}>${(header) => html`<${Opened} header=${header} store=${store} />`}</${Answer}>
  </div>`;
}

/** `j` and `k` go on in the list that the episode was opened from. */
function useSteps(id, context) {
  const number = param('n') === '' ? null : Number(param('n'));
  const step = async (by) => {
    const to = (number ?? -1) + by;
    const next = await listing(context).idAt(to);
    if (next) go(link('e', next, {...context, n: to, view: param('view')}));
  };
  useKeys('Episode', {
    j: ['next episode of the list', () => step(1)], k: ['previous episode of the list', () => step(-1)],
    x: ['mark', () => mark(id)],
    '=': ['compare with the one marked last', () => {
      const other = marked.value.filter((each) => each !== id).at(-1);
      if (other) go(link('c', '', {a: other, b: id, store: context.store}));
    }],
    u: ['back to the list', () => go(link('', '', {...context, n: number}))],
  });
}

function Opened({header, store}) {
  const model = useMemo(() => modelOf(header), [header]);
  const names = Object.keys(VIEWS);
  const view = names.includes(param('view')) ? param('view') : 'conversation';
  const node = param('node') === '' ? null : Math.min(model.total - 1, Number(param('node')) || 0);
  const choose = (at) => at !== null && at !== undefined && put({node: at, tokens: ''});
  const step = (by) => {
    const now = model.answers.findIndex((each) => each >= (node ?? -1));
    const here = node === null ? -1 : now < 0 ? model.answers.length : model.answers[now] === node || by > 0 ? now - (model.answers[now] === node ? 0 : 1) : now;
    choose(model.answers[Math.min(Math.max(0, here + by), model.answers.length - 1)]);
  };
  const beside = (by) => {
    if (node === null) return;
    const all = siblings(model, node);
    choose(all[(all.indexOf(node) + by + all.length) % all.length]);
  };
  useKeys('Views', {
    ...Object.fromEntries(names.map((name) => [VIEWS[name].key, [`view: ${VIEWS[name].name}`, () => put({view: name}, {push: true})]])),
    ArrowRight: ['next turn', () => step(1)], ArrowLeft: ['previous turn', () => step(-1)],
    ArrowDown: ['', () => step(1)], ArrowUp: ['', () => step(-1)],
    ']': ['next answer to the same', () => beside(1)], '[': ['previous answer to the same', () => beside(-1)],
  });
  useEffect(() => { document.getElementById('view')?.scrollTo({top: 0}); }, [header.id, view]);
  const View = VIEWS[view].component;
  return html`
    <section class="middle">
      <header class="title">
        <h1><${Shown} text=${header.task.id} most=${120} /></h1>
        <${Outcome} failure=${header.failure?.kind} stop=${header.stop} value=${judged(header)} />
        <p class="muted id"><${Shown} text=${header.id} /></p>
      </header>
      <div class="tabs" role="tablist" aria-label="Views">${names.map((name) => html`
        <button key=${name} role="tab" id=${`tab-${name}`} aria-selected=${name === view ? 'true' : 'false'} aria-controls="view" onClick=${() => put({view: name}, {push: true})}>${VIEWS[name].name}</button>`)}</div>
      ${header.failure && html`<p class="problem"><b>${header.failure.kind}</b> at <${Shown} text=${header.failure.boundary} />: <${Shown} text=${header.failure.message} /></p>`}
      <div class="view" id="view" role="tabpanel" aria-labelledby=${`tab-${view}`} tabindex="0"><${View} model=${model} node=${node} choose=${choose} store=${store} /></div>
    </section>
    <${Figures} model=${model} node=${node} store=${store} />`;
}
