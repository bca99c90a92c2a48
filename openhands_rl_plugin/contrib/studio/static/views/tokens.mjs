// What was sampled, token by token, coloured by what is known of each.
import {useEffect, useLayoutEffect, useMemo, useRef, useState} from 'preact/hooks';
import {html} from 'studio/base/html';
import {cell, exported, query, rowsOf, useAnswer} from 'studio/base/api';
import {count, fixed, known, plural} from 'studio/base/format';
import {useKeys} from 'studio/base/keys';
import {param, put} from 'studio/base/route';
import {Shown, plain} from 'studio/base/text';
import {COLOURS, PAGE, labelsAt, offered, outliers, sampledIn, shade, spanOf, spanText, tokensOf} from 'studio/base/tokens';
import {toRemark} from 'studio/parts/labelling';
import {Empty, Problem, Waiting} from 'studio/parts/states';

export function Tokens({model, node, choose, store}) {
  const start = node !== null && model.of('sampled')(node) ? node : model.answers.find((each) => each >= (node ?? 0)) ?? model.answers.at(-1) ?? null;
  const stream = useStream(model, start, store);
  const {error, next} = stream;
  const group = useGroup(model.header, store, param('colour') === 'advantage');
  const pages = useMemo(() => (group.advantage === null ? stream.pages : stream.pages.map((page) => ({...page, advantage: group.advantage}))), [stream.pages, group.advantage]);
  const [hover, point] = useState(null);
  const place = useRef(null);
  const names = useMemo(() => offered(pages), [pages]);
  const colour = names.includes(param('colour')) ? param('colour') : names[0] ?? 'mask';
  const marked = param('tokens');
  const span = spanOf(marked);
  const labels = useMemo(() => model.header.labels.filter((each) => each.tokens), [model]);
  const lengthen = (by) => {
    const total = span && pages.find((page) => page.node === span.node)?.total;
    if (total) put({tokens: spanText({...span, last: Math.min(Math.max(span.first, span.last + by), total - 1)})});
  };
  const found = useMemo(() => outliers(pages, colour), [pages, colour]);
  const jump = (by) => {
    if (!found.length) return;
    const now = found.findIndex(({page, at}) => name(page, at) === marked);
    const to = found[(now < 0 ? (by > 0 ? 0 : found.length - 1) : now + by + found.length) % found.length];
    put({tokens: name(to.page, to.at)});
  };
  useKeys('Tokens', {
    n: ['next outlier', () => jump(1)], N: ['previous outlier', () => jump(-1)],
    '>': ['select one token more', () => lengthen(1)], '<': ['select one token less', () => lengthen(-1)],
    v: ['next colour', () => put({colour: names[(names.indexOf(colour) + 1) % names.length]})],
  });
  useEffect(() => {
    for (const token of place.current?.querySelectorAll('.t.at') ?? []) token.classList.remove('at', 'part');
    const last = Math.min(span?.last, pages.find((page) => page.node === span?.node)?.total ?? -1);
    let token = null;
    for (let at = span?.first; at <= last; at += 1) {
      token = place.current?.querySelector(`[data-t="${span.node}.${at}"]`) ?? token;
      token?.classList.add('at', ...(span.last > span.first ? ['part'] : []));
    }
    token?.scrollIntoView({block: 'nearest'});
    if (token) point(token.dataset.t);
  }, [marked, pages, colour, labels]);
  if (start === null) return html`<${Empty} title="No tokens">Nothing was sampled in this episode.</${Empty}>`;
  if (error) return html`<${Problem} error=${error} />`;
  if (!pages.length) return html`<${Waiting} rows=${8} />`;
  if (pages.every((page) => !page.total)) {
    const why = (model.of('lacks')(start) ?? []).join('; ');
    return html`<${Empty} title="No token ids were recorded">${why || 'The server that answered sends none. vLLM does with return_token_ids, and so does openhands-rl serve.'}</${Empty}>`;
  }
  return html`<div class="tokens">
    <div class="strip"><span class="group" role="group" aria-label="Colour by">${names.map((each) => html`<button key=${each} aria-pressed=${each === colour ? 'true' : 'false'} onClick=${() => put({colour: each})}>${COLOURS[each].name}</button>`)}</span>
      <span class="muted">${COLOURS[colour].scale === 'flag' ? COLOURS[colour].unit : `${COLOURS[colour].span.map((each) => fixed(each, 0)).join(' to ')} ${COLOURS[colour].unit}`}</span>
      <span class="grow"></span>${COLOURS[colour].scale !== 'flag' && html`<button disabled=${!found.length} onClick=${() => jump(1)}>${plural(found.length, 'outlier')}</button>`}</div>
    ${group.note && html`<p class="note">${group.note}</p>`}
    ${pages[0].tokenizer && !pages.some((page) => page.tokens.text) && html`<p class="note">Ids are shown: ${pages[0].tokenizer}.</p>`}
    <${Hover} pages=${pages} name=${hover} labels=${labels} chosen=${sampledIn(span, model)} />
    <div class="stream" ref=${place} onPointerOver=${(event) => event.target.dataset?.t && point(event.target.dataset.t)}
      onClick=${(event) => { const chosen = chosenBy(event, span); if (chosen) put({tokens: spanText(chosen)}); }}>
      ${pages.map((page) => html`<${Page} key=${`${page.node}-${page.from}`} page=${page} colour=${colour} labels=${labels} turn=${model.of('turn')(page.node)} choose=${choose} />`)}
    </div>
    ${next && html`<p class="strip"><button onClick=${next}>More tokens</button></p>`}
  </div>`;
}

/** A token that was clicked; with shift, or after drawing over a text, all of the same turn in between. */
function chosenBy(event, span) {
  const drawn = getSelection();
  const ends = [drawn.anchorNode, drawn.focusNode].map((each) => spanOf(each?.parentElement?.closest('[data-t]')?.dataset.t));
  const clicked = spanOf(event.target.dataset?.t);
  const [one, other] = event.shiftKey && span && clicked ? [span, clicked] : drawn.isCollapsed ? [clicked, clicked] : ends;
  if (!one || one.node !== other?.node) return clicked;
  return {node: one.node, first: Math.min(one.first, other.first), last: Math.max(one.last, other.last)};
}

const name = (page, at) => `${page.node}.${page.from + at}`;

/** The advantage of the whole episode, from the rewards of its group. */
function useGroup(header, store, wanted) {
  const answer = useAnswer(wanted && !exported ? `groups/${header.group.split('/').map(encodeURIComponent).join('/')}${query({store})}` : null, {keep: false});
  if (!wanted) return {advantage: null, note: null};
  if (!answer.data) return {advantage: null, note: answer.error || exported ? 'The group is not there to count the advantage from.' : null};
  const at = (answer.data.samples.id ?? []).indexOf(header.id);
  const advantage = at < 0 ? null : cell(answer.data.samples, 'advantage', at);
  return {advantage, note: advantage === null ? 'The advantage is not known: the episode failed, or nobody has judged its group.' : `${fixed(advantage, 3)} is GRPO’s advantage of the episode, from the rewards of its group as they are now.`};
}

/** Pages from a turn on, along what was acted on, until there are as many tokens as fit. */
function useStream(model, start, store) {
  const [state, set] = useState({pages: [], error: null, rest: null});
  const {id} = model.header;
  const grow = async (pages, rest, wanted) => {
    let size = 0;
    const added = [];
    while (rest && size < PAGE && wanted()) {
      const page = await tokensOf(id, rest.node, rest.from, store);
      const follows = model.answers[model.answers.indexOf(rest.node) + 1];
      added.push({...page, turn: model.of('turn')(rest.node) ?? 0});
      size += rowsOf(page.tokens);
      rest = page.next !== null ? {node: rest.node, from: page.next} : follows === undefined ? null : {node: follows, from: 0};
    }
    if (wanted()) set({pages: [...pages, ...added], rest, error: null});
  };
  useLayoutEffect(() => {
    let here = true;
    if (start !== null) grow([], {node: start, from: 0}, () => here).catch((error) => here && set({pages: [], rest: null, error}));
    return () => { here = false; };
  }, [id, start, store]);
  const next = state.rest && (() => grow(state.pages, state.rest, () => true).catch((error) => set({...state, error})));
  return {...state, next};
}

/** Thousands of tokens are made by hand, as text only, and are coloured anew without being made anew. */
function Page({page, colour, labels, turn, choose}) {
  const place = useRef(null);
  const {tokens, prompt, from} = page;
  const size = rowsOf(tokens);
  useLayoutEffect(() => {
    const made = document.createDocumentFragment();
    for (let at = 0; at < size; at += 1) {
      const text = cell(tokens, 'text', at);
      const token = document.createElement('span');
      token.dataset.t = name(page, at);
      token.textContent = text === null ? `${tokens.id[at]} ` : seen(text);
      made.append(token);
    }
    place.current.replaceChildren(made);
  }, [page]);
  useLayoutEffect(() => {
    const measure = COLOURS[colour];
    const own = labels.filter((each) => each.node === page.node);
    for (let at = 0; at < size; at += 1) {
      place.current.children[at].className = `t${from + at < prompt ? ' prompt' : ''} ${shade(measure.of(tokens, at, page), measure)}${labelsAt(own, page, at).length ? ' noted' : ''}`;
    }
  }, [page, colour, labels]);
  return html`<section class="turn"><h2 class="small"><button class="plain" onClick=${() => choose(page.node)}>Turn ${turn ?? '–'}</button>
    <span>${plural(prompt, 'prompt token')} ${page.extends ? 'new' : 'in full'}, ${count(page.total - prompt)} sampled</span></h2><p class="said" ref=${place}></p></section>`;
}

/** A line feed has no width of its own, and a colour needs one. */
const seen = (text) => plain(text).replaceAll('\n', '⏎\n').replaceAll('\t', '⇥\t') || '·';

function Hover({pages, name: wanted, labels, chosen}) {
  const [node, place] = (wanted ?? '').split('.').map(Number);
  const page = pages.find((each) => each.node === node && place >= each.from && place < each.from + rowsOf(each.tokens));
  if (!page) return html`<p class="hover muted">Point at a token, or press n.</p>`;
  const at = place - page.from;
  const of = (column) => cell(page.tokens, column, at);
  const server = of('logprob');
  return html`<p class="hover"><code>${seen(of('text') ?? '')}</code>
    <span>id ${of('id')}</span><span>${place < page.prompt ? 'prompt' : 'sampled'}</span>
    ${known(server) && html`<span>logprob ${fixed(server, 4)} <span class="muted">p ${fixed(Math.exp(server), 3)}</span></span>`}
    ${known(COLOURS.advantage.of(page.tokens, at, page)) && html`<span>advantage ${fixed(COLOURS.advantage.of(page.tokens, at, page), 3)}</span>`}
    ${labelsAt(labels, page, at).map((each) => html`<span key=${each.id} class="remark">“<${Shown} text=${each.text} most=${300} />” <small class="muted"><${Shown} text=${each.author} most=${60} /></small></span>`)}
    ${chosen && !exported && html`<button class="plain" onClick=${toRemark}>comment on ${plural(chosen.tokens[1] - chosen.tokens[0], 'token')}</button>`}</p>`;
}
