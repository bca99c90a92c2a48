// A long column of things of any height: only the blocks near the view are in the page, the others keep their height.
import {useEffect, useLayoutEffect, useRef, useState} from 'preact/hooks';
import {html} from 'studio/base/html';

const BLOCK = 20;

/** `children(item, number)`; `guess`: pixels of an item that was never drawn. `at`: the item that must be drawn. */
export function Windowed({items, guess, at = null, children}) {
  const blocks = Array.from({length: Math.ceil(items.length / BLOCK)}, (_, number) => number);
  const wanted = at === null || at < 0 ? 0 : Math.floor(at / BLOCK);
  return blocks.map((number) => html`<${Block} key=${number} first=${number * BLOCK} items=${items.slice(number * BLOCK, (number + 1) * BLOCK)}
    guess=${guess} keep=${Math.abs(number - wanted) <= 0} draw=${children} />`);
}

function Block({first, items, guess, keep, draw}) {
  const place = useRef(null);
  const height = useRef(items.length * guess);
  const [near, set] = useState(first === 0);
  useEffect(() => {
    const watch = new IntersectionObserver((seen) => set(seen.at(-1).isIntersecting), {rootMargin: '1200px 0px'});
    watch.observe(place.current);
    return () => watch.disconnect();
  }, []);
  const shown = near || keep;
  useLayoutEffect(() => { if (shown) height.current = place.current.offsetHeight; });
  return html`<div ref=${place} style=${shown ? {} : {height: `${height.current}px`}}>${shown && items.map((item, at) => draw(item, first + at))}</div>`;
}
