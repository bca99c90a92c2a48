// Tokens of turns as one stream, and how their colours are found.
import {ask, cell, query, rowsOf} from 'studio/base/api';

export const PAGE = 4096;

/** A page of the tokens of a node: `{node, from, total, prompt, next, extends, tokenizer, tokens}`. */
export const tokensOf = (id, node, from, store) => ask(`episodes/${encodeURIComponent(id)}/nodes/${node}/tokens${query({from, store})}`);

/** `NODE.PLACE` or `NODE.FIRST-LAST` of an address, or null. Places count from the first token of the prompt. */
export function spanOf(text) {
  const found = /^(\d+)\.(\d+)(?:-(\d+))?$/.exec(text ?? '');
  if (!found) return null;
  const [node, first, last] = found.slice(1).map((each) => (each === undefined ? null : Number(each)));
  return {node, first: Math.min(first, last ?? first), last: Math.max(first, last ?? first)};
}

export const spanText = ({node, first, last}) => `${node}.${first}${last > first ? `-${last}` : ''}`;

/** What was sampled of a span, as labels name it: `{node, tokens: [first, end]}` of the node's sampled tokens, or null. */
export function sampledIn(span, model) {
  const prompt = span && model.of('prompt_tokens')(span.node);
  if (prompt === null || prompt === undefined) return null;
  const tokens = [Math.max(span.first - prompt, 0), Math.min(span.last + 1 - prompt, model.of('sampled_tokens')(span.node))];
  return tokens[0] < tokens[1] ? {node: span.node, tokens} : null;
}

/** The labels that are about a token of a page, by its place in the page. */
export const labelsAt = (labels, page, at) => labels.filter(({node, tokens}) => {
  const place = page.from + at - page.prompt;
  return tokens && node === page.node && place >= tokens[0] && place < tokens[1];
});

/** The measures that a page may have; a column that nobody recorded is not offered. */
export const COLOURS = {
  logprob: {name: 'logprob', columns: ['logprob'], of: (t, at) => cell(t, 'logprob', at), span: [-4, 0], scale: 'low', unit: 'nats'},
  advantage: {name: 'advantage', columns: [], of: (t, at, page) => (page.from + at >= page.prompt ? page.advantage ?? null : null), span: [-2, 2], scale: 'both', unit: ''},
  mask: {name: 'mask', columns: [], of: (t, at, page) => (page.from + at >= page.prompt ? 1 : 0), span: [0, 1], scale: 'flag', unit: 'trained or not'},
  turn: {name: 'turn', columns: [], of: (t, at, page) => page.turn % 2, span: [0, 1], scale: 'flag', unit: 'every other turn'},
};

export const offered = (pages) => Object.keys(COLOURS).filter((name) => COLOURS[name].columns.every((column) => pages.some((page) => page.tokens[column])));

/** A class of the style sheet: steps from pale to strong, of one colour or of two. */
export function shade(value, {span: [least, most], scale}) {
  if (value === null) return '';
  const share = Math.max(0, Math.min(1, (value - least) / (most - least)));
  if (scale === 'flag') return share > 0.5 ? 'f1' : '';
  if (scale === 'both') {
    const side = Math.round(Math.abs(share - 0.5) * 16);
    return side ? `${share < 0.5 ? 'n' : 'p'}${side}` : '';
  }
  const step = Math.round((1 - share) * 8);
  return step ? `n${step}` : '';
}

/** Places of the tokens that stand out: the least likely, or those with the largest difference. */
export function outliers(pages, name) {
  const {of, span, scale} = COLOURS[name];
  const bound = scale === 'low' ? span[0] / 2 : span[1] / 2;
  const found = [];
  for (const page of pages) {
    for (let at = 0; at < rowsOf(page.tokens); at += 1) {
      const value = of(page.tokens, at, page);
      if (value === null || scale === 'flag') continue;
      if (scale === 'low' ? value < bound : Math.abs(value) > bound) found.push({page, at});
    }
  }
  return found;
}

