// Templates. Their values become text nodes or attributes, never markup.
import {h} from 'preact';
import htm from 'htm';

export const html = htm.bind(h);
