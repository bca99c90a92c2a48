// An exported file answers from what was put into it; pages of nodes and tokens are cut as the server does.
const CHUNK = 64;
/** Parameters that choose among answers of one address; `reports/answers.py` has the same order. */
const CHOOSING = ['file', 'instance', 'a', 'b'];

export function localAnswer(data, path) {
  const [where, asked = ''] = path.split('?');
  const params = new URLSearchParams(asked);
  const parts = where.split('/').map(decodeURIComponent);
  const chosen = CHOOSING.map((name) => params.get(name)).filter(Boolean).join('&');
  const found = parts[0] === 'episodes' && parts.length > 2 ? ofEpisode(data, parts, params) : chosen ? data[`${parts.join('/')}?${chosen}`] : data[where] ?? data[parts.join('/')];
  if (where === 'episodes' && found) return page(found, params);
  if (found === undefined || found === null) throw new Error('This is not in the exported file.');
  return found;
}

function ofEpisode(data, [, id, what, node, more], params) {
  const whole = data[`episodes/${encodeURIComponent(id)}/${what}${node ? `/${node}/${more}` : ''}`];
  if (what !== 'nodes' || !whole) return whole;
  const from = Number(params.get('from') ?? 0);
  if (node) return whole;
  const end = Math.min(Number(params.get('to') ?? whole.total), from + CHUNK, whole.total);
  return {total: whole.total, next: end < whole.total ? end : null, nodes: cut(whole.nodes, from, end)};
}

function page(whole, params) {
  const from = Number(params.get('offset') ?? 0);
  const end = from + Number(params.get('limit') ?? 100);
  return {...whole, offset: from, rows: cut(whole.rows, from, end)};
}

const cut = (table, from, end) => Object.fromEntries(Object.entries(table).map(([name, column]) => [name, column.slice(from, end)]));
