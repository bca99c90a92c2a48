// The frame around every page: where one is, where one can go, and what to say when something is missing.
import {Component, render} from 'preact';
import {useEffect, useRef} from 'preact/hooks';
import {exported, go, html, link, listen, moment, nextTheme, param, put, route, signedOut, theme, useAnswer, useKeys, useLive} from 'studio/base';
import data from 'studio/data';
import {PAGES, SignIn} from 'studio/pages';
import {Empty, Help, helpShown, notice} from 'studio/parts';
const NAV = Object.entries(PAGES).filter(([, page]) => page.nav && (!exported || data[page.needs]));

export function start(place) {
  place.textContent = '';
  render(html`<${App} />`, place);
  listen();
}

function App() {
  const {page, id} = route.value;
  const shown = PAGES[page];
  useEffect(() => { document.title = [id && id.slice(0, 60), shown?.name, 'Studio'].filter(Boolean).join(' · '); }, [page, id]);
  useKeys('Everywhere', {
    ...Object.fromEntries(NAV.map(([path, each]) => [`g ${each.key}`, [`go to ${each.name}`, () => go(link(path, '', {store: param('store')}))]])),
    l: ['copy the link to this', copyLink],
    T: ['change the theme', nextTheme],
    '?': ['show the keys', () => { helpShown.value = true; }],
  });
  return html`
    <a class="skip" href="#main">Skip to the content</a>
    <${Bar} page=${page} />
    <main id="main" tabindex="-1">
      ${signedOut.value
        ? html`<${SignIn} />`
        : html`<${Guard} key=${`${page}/${id}`}>${shown
            ? html`<${shown.component} id=${id} />`
            : html`<${Empty} title="There is no such page">Its address begins with “${page}”. <a href=${link('')}>All episodes</a></${Empty}>`}</${Guard}>`}
    </main>
    <${Help} />
    <div class="toast" role="status" aria-live="polite">${notice.value}</div>`;
}

function Bar({page}) {
  const about = useAnswer(exported ? null : 'about');
  useLive((events) => events.some(({kind}) => kind === 'reset') && about.again());
  const stores = about.data?.stores ?? [];
  const nav = useRef(null);
  // On a narrow page not all names are in view.
  useEffect(() => { nav.current?.querySelector('[aria-current=page]')?.scrollIntoView({block: 'nearest', inline: 'center'}); }, [page, about.data]);
  const words = {system: 'Theme: as the system', light: 'Theme: light', dark: 'Theme: dark'}[theme.value];
  return html`<header class="bar">
    <a class="brand" href=${link('')} aria-label="Studio, all episodes"><${Mark} /> Studio</a>
    <nav aria-label="Pages" ref=${nav}>${NAV.map(([path, each]) => html`
      <a key=${path} href=${link(path, '', {store: param('store')})} aria-current=${(PAGES[page]?.nav ?? PAGES[page]?.below) === each.nav ? 'page' : null}>${each.name}</a>`)}</nav>
    ${exported && html`<span class="muted made">${data.export.made ? `made ${moment(data.export.made)}, ` : ''}nothing is fetched</span>`}
    ${stores.length > 1 && html`<select class="store" aria-label="Store" value=${param('store') || stores[0]} onChange=${(event) => put({store: event.target.value, n: ''}, {push: true})}>
      ${stores.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select>`}
    <button class="icon" title=${words} aria-label=${words} onClick=${nextTheme}><${ThemeIcon} /></button>
    <button class="icon" title="Keys (?)" aria-label="Keys" onClick=${() => { helpShown.value = true; }}>?</button>
  </header>`;
}
const Mark = () => html`<svg class="mark" viewBox="0 0 20 20" aria-hidden="true"><path d="M4 10h4l4-6h4M8 10l4 6h4M8 10h8" /><circle cx="4" cy="10" r="2" /></svg>`;

const ThemeIcon = () => html`<svg viewBox="0 0 20 20" aria-hidden="true"><circle cx="10" cy="10" r="6.5" class="ring" />
  ${theme.value === 'system' ? html`<path d="M10 3.5a6.5 6.5 0 0 1 0 13z" />` : theme.value === 'dark' && html`<circle cx="10" cy="10" r="6.5" />`}</svg>`;

function copyLink() {
  const notify = (text) => { notice.value = text; setTimeout(() => { notice.value = ''; }, 2000); };
  navigator.clipboard?.writeText(location.href).then(() => notify('Link copied'), () => notify('The browser did not allow copying')) ?? notify('The browser cannot copy here');
}

/** A page that fails says so, and the rest of the studio goes on. */
class Guard extends Component {
  componentDidCatch(error) {
    console.warn(error);
    this.setState({error});
  }
  render({children}, {error}) {
    if (!error) return children;
    return html`<${Empty} title="This page has failed"><p>${String(error)}</p>
      <button onClick=${() => this.setState({error: null})}>Try again</button></${Empty}>`;
  }
}
