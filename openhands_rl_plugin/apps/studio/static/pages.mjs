// What is at which address, and the key that leads there.
import {Compare} from 'studio/pages/compare';
import {Episode} from 'studio/pages/episode';
import {Episodes} from 'studio/pages/episodes';
import {Group} from 'studio/pages/group';
import {Queue} from 'studio/pages/queue';

export const PAGES = {
  '': {name: 'Episodes', nav: 'e', key: 'e', component: Episodes},
  e: {name: 'Episode', component: Episode},
  g: {name: 'Group', component: Group},
  c: {name: 'Compare', nav: 'c', key: 'c', component: Compare},
  q: {name: 'Queue', nav: 'q', key: 'q', component: Queue},
};
