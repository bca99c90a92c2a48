// The first module of every page. It uses nothing that an old browser lacks, so that it can say what is missing.
const missing = [];
if (!(window.HTMLScriptElement && HTMLScriptElement.supports && HTMLScriptElement.supports('importmap'))) missing.push('import maps');
if (!window.CSS || !CSS.supports('color', 'light-dark(red, blue)')) missing.push('light-dark colours');
if (!window.IntersectionObserver || !window.ResizeObserver) missing.push('observers');

function say(...lines) {
  const place = document.getElementById('app');
  place.textContent = '';
  for (const line of lines) {
    const paragraph = document.createElement('p');
    paragraph.className = 'bare';
    paragraph.textContent = line;
    place.append(paragraph);
  }
}

if (missing.length) {
  say(`This browser lacks ${missing.join(', ')}.`, 'The studio needs Chrome or Edge 123, Firefox 120, Safari 17.5, or newer.');
} else {
  import('studio/app').then(
    (app) => app.start(document.getElementById('app')),
    (error) => say('The studio could not start.', String(error), 'Reload the page; if that does not help, restart the studio.'),
  );
}
