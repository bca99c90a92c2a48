// What people say of episodes. Sent at once; the answer has all that holds now.
import {send} from 'studio/base/api';
import {forget} from 'studio/base/api';

export async function label(episode, fields, store) {
  const {labels} = await send(`labels${store ? `?store=${encodeURIComponent(store)}` : ''}`, {episode, ...fields});
  forget(`episodes/${encodeURIComponent(episode)}`);
  forget('facets');
  return labels;
}

export const words = {
  verdict: (each) => (each.value === null ? 'verdict' : each.value >= 1 ? 'good' : each.value <= 0 ? 'bad' : `verdict ${each.value}`),
  preference: (each) => (each.value > 0.5 ? `better than ${each.other}` : each.value < 0.5 ? `worse than ${each.other}` : `as good as ${each.other}`),
  comment: () => '',
  tag: () => '',
};
