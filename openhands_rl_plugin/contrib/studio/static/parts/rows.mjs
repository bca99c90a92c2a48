// A list of any length of which only what is in view is in the page. Rows have one height.
import {useEffect, useLayoutEffect, useRef, useState} from 'preact/hooks';
import {html} from 'studio/base/html';

const SPARE = 12;

/** `children(number)` draws a row, with `more` columns than usual. `shown(first, last)` hears what is in view. `at`: the row that must be in view. */
export function Rows({total, height, at = null, shown, label, head, more = 0, children}) {
  const place = useRef(null);
  const [view, set] = useState({top: 0, size: 600});
  const look = () => place.current && set({top: place.current.scrollTop, size: place.current.clientHeight});
  useEffect(() => {
    const watch = new ResizeObserver(look);
    watch.observe(place.current);
    return () => watch.disconnect();
  }, []);
  useLayoutEffect(() => {
    if (at === null) return;
    const {scrollTop, clientHeight} = place.current;
    const from = at * height;
    if (from < scrollTop) place.current.scrollTop = from;
    else if (from + height > scrollTop + clientHeight) place.current.scrollTop = from + height - clientHeight;
  }, [at, view.size]);
  const first = Math.max(0, Math.floor(view.top / height) - SPARE);
  const last = Math.min(total, Math.ceil((view.top + view.size) / height) + SPARE);
  useLayoutEffect(() => { shown?.(first, last); }, [first, last, total]);
  return html`<div class=${`table more${more}`} role="table" aria-label=${label} aria-rowcount=${total}>
    ${head}
    <div class="scroll" ref=${place} onScroll=${look} tabindex="0" role="rowgroup">
      <div class="tall" role="presentation" style=${{height: `${total * height}px`}}>
        ${Array.from({length: Math.max(0, last - first)}, (_, n) => children(first + n, {transform: `translateY(${(first + n) * height}px)`, height: `${height}px`}))}
      </div>
    </div>
  </div>`;
}
