// A browser without a session: the link in the terminal opens one, or the key does.
import {useState} from 'preact/hooks';
import {html} from 'studio/base/html';
import {send, signedOut} from 'studio/base/api';
import {Problem} from 'studio/parts/states';

export function SignIn() {
  const [error, failed] = useState(null);
  const enter = (event) => {
    event.preventDefault();
    const given = event.target.elements.secret.value.trim();
    const token = new URLSearchParams(given.split('?')[1] ?? '').get('token') ?? given;
    send('session', {key: given, token}).then(() => { signedOut.value = false; location.reload(); }, failed);
  };
  return html`<section class="empty"><h1>Open the link that the terminal shows</h1>
    <p><code>openhands-rl studio</code> prints a link that opens one browser. It prints another one after each use.</p>
    <form class="line" onSubmit=${enter}><label>Or paste the link or the key <input name="secret" type="password" autocomplete="off" required /></label>
      <button class="primary">Enter</button></form>
    ${error && html`<${Problem} error=${error} />`}</section>`;
}
