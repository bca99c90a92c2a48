// The views of an episode. They share one selected node, which is in the address.
import {Breaks} from 'studio/views/breaks';
import {Conversation} from 'studio/views/conversation';
import {Tokens} from 'studio/views/tokens';
import {Tree} from 'studio/views/tree';

export const VIEWS = {
  conversation: {name: 'Conversation', key: 'c', component: Conversation},
  tree: {name: 'Tree', key: 't', component: Tree},
  tokens: {name: 'Tokens', key: 'o', component: Tokens},
  breaks: {name: 'Breaks', key: 'b', component: Breaks},
};
