// Shares over stages or attempts, with their intervals: few points, each of which has a name.
import {useLayoutEffect, useRef, useState} from 'preact/hooks';
import {html} from 'studio/base/html';
import {fixed} from 'studio/base/format';

const [HEIGHT, LEFT, RIGHT, TOP] = [200, 36, 12, 12];
const LEAST = 16;

/** `slots`: names along the axis. `series`: `[{name, kind, points: [{slot, value, low, high}]}]`, of kinds `main`, `other` and `dashed`. */
export function Trend({label, slots, series}) {
  const place = useRef(null);
  const [width, set] = useState(0);
  useLayoutEffect(() => {
    const look = () => place.current && set(place.current.clientWidth);
    const watch = new ResizeObserver(look);
    watch.observe(place.current);
    look();
    return () => watch.disconnect();
  }, []);
  const drawn = series.filter((each) => each.points.length);
  return html`<figure class="trend"><figcaption class="line">${drawn.map((each) => html`<span key=${each.name} class=${`key ${each.kind}`}><svg viewBox="0 0 24 12" aria-hidden="true"><line x1="0" x2="24" y1="6" y2="6" /><circle cx="12" cy="6" r="3.5" /></svg>${each.name}</span>`)}</figcaption>
    <div ref=${place}>${width > 0 && html`<${Drawn} label=${label} slots=${slots} series=${drawn} width=${width} />`}</div></figure>`;
}

function Drawn({label, slots, series, width}) {
  const values = series.flatMap((each) => each.points.flatMap(({value, low, high}) => [value, low ?? value, high ?? value]));
  const [least, most] = [Math.min(0, ...values), Math.max(1, ...values)];
  const step = (width - LEFT - RIGHT) / Math.max(slots.length, 1);
  const every = Math.ceil(LEAST / step);
  // Names that do not fit beside each other stand in two lines, or are turned.
  const wide = (lines) => Math.max(0, ...lines.flat().map((each) => each.length)) * 6.2;
  const halves = slots.map((each) => (each.includes('-') ? [each.slice(0, each.indexOf('-') + 1), each.slice(each.indexOf('-') + 1)] : [each]));
  const fits = (lines) => wide(lines) + 8 <= step * every;
  const turned = !fits(slots) && !fits(halves);
  const lines = fits(slots) || turned ? slots.map((each) => [each.length > 21 ? `${each.slice(0, 20)}…` : each]) : halves;
  const below = turned ? Math.min(wide(slots), 130) * 0.87 + 16 : 10 + 14 * Math.max(1, ...lines.map((each) => each.length));
  const x = (slot) => LEFT + step * (slot + 0.5);
  const y = (value) => TOP + (HEIGHT - TOP) * (1 - (value - least) / (most - least));
  const ticks = Array.from({length: 6}, (_, at) => least + ((most - least) * at) / 5);
  const said = series.map((each) => `${each.name}: ${each.points.map(({slot, value}) => `${slots[slot]} ${fixed(value)}`).join(', ')}`).join('; ');
  return html`<svg width=${width} height=${HEIGHT + below} role="img" aria-label=${`${label}. ${said}`}>
    ${ticks.map((tick) => html`<g key=${tick} class="tick"><line x1=${LEFT} x2=${width - RIGHT} y1=${y(tick)} y2=${y(tick)} /><text x=${LEFT - 8} y=${y(tick) + 4} text-anchor="end">${fixed(tick, 1)}</text></g>`)}
    ${slots.map((_, slot) => slot % every === 0 && html`<text key=${slot} class="slot" text-anchor=${turned ? 'end' : 'middle'} transform=${`translate(${x(slot) + (turned ? 4 : 0)} ${HEIGHT + 16})${turned ? ' rotate(-60)' : ''}`}>${lines[slot].map((each, at) => html`<tspan key=${at} x="0" dy=${at ? 14 : 0}>${each}</tspan>`)}</text>`)}
    ${series.map((each) => html`<g key=${each.name} class=${`series ${each.kind}`}>
      <polyline points=${each.points.map(({slot, value}) => `${x(slot)},${y(value)}`).join(' ')} />
      ${each.points.map(({slot, value, low, high}) => html`<g key=${slot}>${low !== null && low !== undefined && html`<line class="spread" x1=${x(slot)} x2=${x(slot)} y1=${y(low)} y2=${y(high)} />`}
        <circle cx=${x(slot)} cy=${y(value)} r="3.5"><title>${`${each.name}, ${slots[slot]}: ${fixed(value, 3)}${low === null || low === undefined ? '' : ` (${fixed(low, 3)} to ${fixed(high, 3)})`}`}</title></circle></g>`)}
    </g>`)}</svg>`;
}
