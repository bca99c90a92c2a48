// The list that an episode was opened from, beside it.
import {html} from 'studio/base/html';
import {Shown} from 'studio/base/text';
import {PAGE, listing} from 'studio/base/listing';
import {link, param} from 'studio/base/route';
import {count} from 'studio/base/format';
import {Outcome, earned} from 'studio/parts/episode_row';
import {Rows} from 'studio/parts/rows';

const HEIGHT = 52;

export function Neighbours({id, context}) {
  const list = listing(context);
  const at = param('n') === '' ? null : Number(param('n'));
  const total = list.total.value;
  list.tick.value;
  const row = (number, style) => {
    const each = list.row(number);
    if (!each) return html`<div class="neighbour" role="row" key=${number} style=${style}><span role="cell" class="bone w1"></span></div>`;
    return html`<div class=${`neighbour${each.id === id ? ' here' : ''}`} role="row" aria-rowindex=${number + 1} key=${number} style=${style}><span role="cell">
      <a href=${link('e', each.id, {...context, n: number, view: param('view')})} aria-current=${each.id === id ? 'true' : null}>
        <b><${Shown} text=${each.task} most=${80} /></b><${Outcome} failure=${each.failed} stop=${each.stop} value=${earned(each)} />
        <small class="muted"><${Shown} text=${each.id} most=${80} /></small></a></span></div>`;
  };
  return html`<aside class="neighbours" aria-label="The list">
    <p class="strip"><a href=${link('', '', {...context, n: at})}>Episodes</a> <span class="muted">${total === null ? '' : count(total)}</span></p>
    ${total !== null && html`<${Rows} total=${total} height=${HEIGHT} at=${at} label="Episodes of the list"
      shown=${(first, last) => { for (let page = Math.floor(first / PAGE); page * PAGE < last; page += 1) list.load(page); }}>${row}</${Rows}>`}
  </aside>`;
}
