// All episodes of a store: searched, narrowed by facets, and one row each.
import {useEffect, useRef, useState} from 'preact/hooks';
import {html} from 'studio/base/html';
import {Shown} from 'studio/base/text';
import {useKeys} from 'studio/base/keys';
import {useLive} from 'studio/base/live';
import {PAGE, listing, mark, marked} from 'studio/base/listing';
import {exported, query} from 'studio/base/api';
import {count, plural} from 'studio/base/format';
import {filters, go, link, param, put} from 'studio/base/route';
import {EpisodeRow, HEAD, OPINIONS} from 'studio/parts/episode_row';
import {Narrow} from 'studio/parts/narrow';
import {Rows} from 'studio/parts/rows';
import {Empty, Problem, Waiting} from 'studio/parts/states';

const HEIGHT = 36;

export function Episodes() {
  const chosen = filters();
  const params = {store: param('store'), sort: param('sort'), ...chosen};
  const list = listing(params);
  const total = list.total.value;
  const at = param('n') === '' ? null : Number(param('n'));
  const search = useRef(null);
  list.tick.value; // drawn again with every page that comes
  const [changes, changed] = useState(0);
  const news = useRef(new Set()); // an episode that begins and ends is one
  const refresh = () => { news.current.clear(); changed(0); list.refresh(); };
  // Rows do not move below somebody who has chosen one: the news wait until they are asked for.
  useLive((events) => {
    const ids = new Set(events.flatMap(({kind, ids: named}) => (kind === 'grew' ? [] : named ?? [])));
    if (!ids.size && !events.some(({kind}) => ['reset', 'gone', 'open'].includes(kind))) return;
    if (at === null) refresh();
    else if (!ids.size && events.every(({kind}) => kind === 'open')) return;
    else {
      for (const id of ids.size ? ids : ['']) news.current.add(id);
      changed(news.current.size);
    }
  });
  const said = Object.keys(OPINIONS).filter((name) => list.has(name));
  const move = (by) => put({n: Math.min(Math.max(0, (at ?? (by > 0 ? -1 : 0)) + by), Math.max(0, (total ?? 1) - 1))});
  const open = async () => {
    const id = await list.idAt(at ?? 0);
    if (id) go(link('e', id, {...params, n: at ?? 0}));
  };
  const compare = () => {
    const [a, b] = marked.value.slice(-2);
    if (b) go(link('c', '', {a, b, store: params.store}));
  };
  useKeys('Episodes', {
    j: ['next', () => move(1)], k: ['previous', () => move(-1)],
    ArrowDown: ['', () => move(1)], ArrowUp: ['', () => move(-1)],
    PageDown: ['', () => move(15)], PageUp: ['', () => move(-15)],
    Home: ['first', () => put({n: 0})], End: ['last', () => put({n: (total ?? 1) - 1})],
    Enter: ['open', open], r: ['show what is new', refresh],
    x: ['mark', () => list.row(at ?? 0) && mark(list.row(at ?? 0).id)],
    '=': ['compare the two marked last', compare],
    '/': ['search', () => search.current?.focus()],
    Escape: ['', () => (document.activeElement === search.current ? search.current.blur() : (marked.value = []))],
  });
  return html`<div class="page episodes">
    <h1 class="sr">Episodes</h1>
    ${!exported && html`<${Search} input=${search} chosen=${chosen} error=${list.error.value} />`}
    <div class="columns">
      ${!exported && html`<${Narrow} store=${params.store} chosen=${chosen} />`}
      <section class="middle" aria-label="Episodes found">
        <${Selection} news=${changes} refresh=${refresh} total=${total} params=${params} compare=${compare} />
        ${list.error.value && total === null
          ? list.error.value.status === 400
            ? html`<${Empty} title="The filters were not understood">What is wrong with them stands below the search. <a href=${link('', '', {store: params.store})}>Show all episodes</a></${Empty}>`
            : html`<${Problem} error=${list.error.value} again=${() => list.refresh()} />`
          : total === null ? html`<${Waiting} rows=${14} />`
          : total === 0 ? html`<${Nothing} chosen=${chosen} />`
          : html`<${Rows} total=${total} height=${HEIGHT} at=${at} label="Episodes" more=${said.length} head=${HEAD(params.sort, said)}
              shown=${(first, last) => { for (let page = Math.floor(first / PAGE); page * PAGE < last; page += 1) list.load(page); }}>
              ${(number, style) => html`<${EpisodeRow} key=${number} number=${number} row=${list.row(number)} style=${style} params=${params}
                said=${said} here=${number === at} chosen=${marked.value.includes(list.row(number)?.id)} />`}
            </${Rows}>`}
      </section>
    </div>
  </div>`;
}

function Search({input, chosen, error}) {
  const text = chosen.contains ?? '';
  useEffect(() => { if (input.current !== document.activeElement) input.current.value = text; }, [text]);
  const submit = (event) => {
    event.preventDefault();
    put({contains: input.current.value.trim(), n: ''}, {push: true});
  };
  const others = Object.entries(chosen).filter(([name]) => name !== 'contains');
  const wrong = error?.status === 400;
  return html`<form class="search" role="search" onSubmit=${submit}>
    <label class="sr" for="contains">Text in an episode’s id, run, group, task, environment, strategy, model or adapter</label>
    <input id="contains" ref=${input} type="search" spellcheck="false" autocomplete="off" autocapitalize="none" defaultValue=${text}
      aria-invalid=${wrong ? 'true' : null} aria-describedby="search-said" placeholder="a part of an id, run, group, task, environment, strategy, model or adapter" />
    <button class="primary">Search</button>
    ${others.length > 0 && html`<p class="line chosen">${others.map(([name, value]) => html`<button type="button" key=${name} class="more" aria-label=${`no longer ${name} ${value}`} onClick=${() => put({[name]: '', n: ''}, {push: true})}>${name.replace('_', ' ')}: <${Shown} text=${value} most=${60} /> ×</button>`)}</p>`}
    <p id="search-said" class=${wrong ? 'wrong' : 'sr'} role=${error ? 'alert' : null}>${wrong ? error.message : 'Upper and lower case differ.'}</p>
  </form>`;
}

function Selection({news, refresh, total, params, compare}) {
  const ids = marked.value;
  return html`<div class="strip">
    <span class="count" aria-live="polite">${total === null ? '…' : plural(total, 'episode')}</span>
    ${news > 0 && html`<button class="more" onClick=${refresh}>${plural(news, 'change')}, show</button>`}
    <span class="grow"></span>
    ${ids.length > 0 && html`<span class="muted">${count(ids.length)} marked</span>
      <button disabled=${ids.length < 2} onClick=${compare}>Compare</button>
      ${!exported && html`<a class="button" download="episodes.html" href=${`/api/export${query({html: 1, ids: ids.join(','), store: params.store})}`}>Export</a>`}
      <button onClick=${() => { marked.value = []; }}>Clear</button>`}
  </div>`;
}

const Nothing = ({chosen}) => (Object.keys(chosen).length
  ? html`<${Empty} title="No episode is like that">Leave a filter out, or <a href=${link('', '', {store: param('store')})}>show all episodes</a>.</${Empty}>`
  : html`<${Empty} title="No episodes yet">They appear here while they are played: <code>openhands-rl run</code>, <code>openhands-rl demo</code>, or a recording gateway, into this store.</${Empty}>`);
