// What is at which address, and the key that leads there.
import {Adapters} from 'studio/pages/adapters';
import {Compare} from 'studio/pages/compare';
import {Episode} from 'studio/pages/episode';
import {Episodes} from 'studio/pages/episodes';
import {Evaluations} from 'studio/pages/evaluations';
import {Group} from 'studio/pages/group';
import {Queue} from 'studio/pages/queue';
import {Runs} from 'studio/pages/runs';

export const PAGES = {
  '': {name: 'Episodes', nav: 'e', key: 'e', needs: 'episodes', component: Episodes},
  e: {name: 'Episode', below: 'e', component: Episode},
  g: {name: 'Group', below: 'e', component: Group},
  r: {name: 'Runs', nav: 'r', key: 'r', needs: 'runs', component: Runs},
  a: {name: 'Adapters', nav: 'a', key: 'a', needs: 'adapters', component: Adapters},
  v: {name: 'Evaluations', nav: 'v', key: 'v', needs: 'evaluations', component: Evaluations},
  c: {name: 'Compare', nav: 'c', key: 'c', component: Compare},
  q: {name: 'Queue', nav: 'q', key: 'q', component: Queue},
};
