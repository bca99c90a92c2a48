// What is at which address, and the key that leads there.
import {Episode} from 'studio/pages/episode';
import {Episodes} from 'studio/pages/episodes';

export const PAGES = {
  '': {name: 'Episodes', nav: 'e', key: 'e', component: Episodes},
  e: {name: 'Episode', component: Episode},
};
