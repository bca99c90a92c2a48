// The list of episodes for some filters, as far as it was looked at: pages of rows, found by their number in the list.
import {signal} from '@preact/signals';
import {ask, query, row, rowsOf} from 'studio/base/api';

export const PAGE = 100;
const lists = new Map();

class Listing {
  constructor(params) {
    this.params = params;
    this.pages = new Map();
    this.asked = new Map();
    /** Rows in all; null until the first page is there. */
    this.total = signal(null);
    this.error = signal(null);
    /** Goes up with each page that has come. */
    this.tick = signal(0);
  }

  /** The row with a number, or null while its page is on its way. */
  row(number) {
    const rows = this.pages.get(Math.floor(number / PAGE));
    const at = number % PAGE;
    return rows && at < rowsOf(rows) ? row(rows, at) : null;
  }

  /** Whether a row that has come has something in a column. */
  has(column) {
    return [...this.pages.values()].some((rows) => rows[column]?.some((each) => each !== null));
  }

  load(page, {fresh = false} = {}) {
    if (page < 0 || (!fresh && this.asked.has(page))) return this.asked.get(page);
    const path = `episodes${query({...this.params, offset: page * PAGE, limit: PAGE})}`;
    const answer = ask(path, {fresh}).then((found) => {
      this.pages.set(page, found.rows);
      this.total.value = found.total;
      this.error.value = null;
      this.tick.value += 1;
    }, (error) => {
      this.error.value = error;
    });
    this.asked.set(page, answer);
    return answer;
  }

  /** Ask again for all that is known, for example after an episode has ended. The old rows stay until then. */
  refresh() {
    const known = [...this.pages.keys()].slice(-4);
    for (const page of this.asked.keys()) if (!known.includes(page)) { this.asked.delete(page); this.pages.delete(page); }
    return Promise.all((known.length ? known : [0]).map((page) => this.load(page, {fresh: true})));
  }

  async idAt(number) {
    if (number < 0 || (this.total.peek() !== null && number >= this.total.peek())) return null;
    await this.load(Math.floor(number / PAGE));
    return this.row(number)?.id ?? null;
  }
}

/** The list for `{store, sort}` and filters; the same one for the same values. */
export function listing(params) {
  const key = query(params);
  if (!lists.has(key)) {
    if (lists.size > 8) lists.delete(lists.keys().next().value);
    lists.set(key, new Listing(params));
  }
  const found = lists.get(key);
  found.load(0);
  return found;
}

/** Ids that the user marked, in the order of marking. */
export const marked = signal([]);

export const mark = (id) => {
  marked.value = marked.value.includes(id) ? marked.value.filter((each) => each !== id) : [...marked.value, id];
};
