// Light, dark, or as the system says.
import {effect, signal} from '@preact/signals';

const NAME = 'studio-theme';
const ORDER = ['system', 'light', 'dark'];

function kept() {
  try {
    return localStorage.getItem(NAME);
  } catch {
    return null; // a file, or a browser that keeps nothing
  }
}

export const theme = signal(ORDER.includes(kept()) ? kept() : 'system');
/** Counts changes of the colours in use, for what is painted on a canvas. */
export const repaint = signal(0);

effect(() => {
  if (theme.value === 'system') delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme.value;
  repaint.value = repaint.peek() + 1;
  try {
    localStorage.setItem(NAME, theme.value);
  } catch { /* it holds for this page then */ }
});
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { repaint.value += 1; });

export const nextTheme = () => { theme.value = ORDER[(ORDER.indexOf(theme.value) + 1) % ORDER.length]; };

/** The colour that a custom property has now. */
export function colour(name) {
  const probe = document.createElement('i');
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
