// A curve over steps. The library is asked for when the first one is drawn.
import {useEffect, useRef, useState} from 'preact/hooks';
import {html} from 'studio/base/html';
import {fixed, short} from 'studio/base/format';
import {colour, repaint} from 'studio/base/theme';

const HEIGHT = 132;

const said = (value) => (value === null || value === undefined ? '–' : Math.abs(value) >= 1000 ? short(value) : Math.abs(value) > 0 && Math.abs(value) < 0.01 ? value.toExponential(1) : fixed(value, 3));

/** `iteration-007` -> `7`, where the names would not fit. */
const brief = (name) => name.replace(/^iteration-0*(?=\d)/, '').slice(0, 10);

/** `names`: of the points, where they are not steps. */
export function Curve({name, x, y, names}) {
  const place = useRef(null);
  const chart = useRef(null);
  const [at, point] = useState(null);
  const painted = repaint.value;
  const known = y.filter((each) => each !== null);
  useEffect(() => {
    let here = true;
    import('uplot').then(({default: UPlot}) => {
      if (!here || !place.current) return;
      const [line, grid, words] = [colour('--accent'), colour('--line'), colour('--muted')];
      const axis = {stroke: words, grid: {stroke: grid, width: 1}, ticks: {show: false}, font: '11px system-ui', size: 24, gap: 4};
      chart.current = new UPlot({
        width: place.current.clientWidth, height: HEIGHT, legend: {show: false}, padding: [8, 8, 0, 0],
        cursor: {y: false, points: {size: 6}}, scales: {x: {time: false}},
        hooks: {setCursor: [(plot) => point(plot.cursor.idx)]},
        axes: [names ? {...axis, splits: () => x.filter((_, at) => at % Math.ceil(x.length / 8) === 0), values: (_, splits) => splits.map((each) => brief(names[each] ?? ''))} : axis, {...axis, size: 48, values: (_, splits) => splits.map((each) => short(each))}],
        series: [{}, {stroke: line, width: 1.5, spanGaps: true, points: {show: known.length < 2 || Boolean(names)}}],
      }, [x, y], place.current);
    }, () => {});
    const watch = new ResizeObserver(() => chart.current?.setSize({width: place.current.clientWidth, height: HEIGHT}));
    watch.observe(place.current);
    return () => {
      here = false;
      watch.disconnect();
      chart.current?.destroy();
      chart.current = null;
    };
  }, [painted]);
  useEffect(() => { chart.current?.setData([x, y]); }, [x, y]);
  const shown = at === null ? known.at(-1) : y[at];
  return html`<figure class="curve"><figcaption><b>${name}</b><span>${said(shown)}${at !== null ? html` <span class="muted">at ${names?.[at] ?? x[at]}</span>` : ''}</span></figcaption>
    <div class="plot" ref=${place} role="img" aria-label=${`${name}: ${known.length} values, from ${said(known[0])} to ${said(known.at(-1))}`}></div></figure>`;
}
