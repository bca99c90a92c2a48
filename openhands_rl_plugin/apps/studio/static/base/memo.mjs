// A component that is drawn again only when one of its properties is another one.
import {Component, h} from 'preact';

export function memo(draw) {
  return class Memo extends Component {
    shouldComponentUpdate(next) {
      return Object.keys({...next, ...this.props}).some((name) => name !== 'choose' && next[name] !== this.props[name]);
    }

    render(props) {
      return h(draw, props);
    }
  };
}
