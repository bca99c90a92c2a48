"""Checks of servers: the model's and the environment's."""

from __future__ import annotations

from collections.abc import Iterator

import httpx

from openhands_rl_plugin.cli.doctor_checks.findings import Finding, fail, ok, warn
from openhands_rl_plugin.core.errors import InfrastructureError, RLError, describe
from openhands_rl_plugin.models.engines.server_models import listed_models

SECONDS = 10.0
PROBE_SECONDS = 60.0


def check_model_server(base_url: str, model: str, api_key: str | None, *, probe: bool) -> Iterator[Finding]:
    """List the models; with ``probe`` also request one token, which must come with ids and logprobs."""
    what = f"model server {base_url}"
    start = "start it, for example with `openhands-rl serve`, or change [rl.serving] base_url"
    try:
        listed = listed_models(base_url, api_key, SECONDS)
    except RLError as error:
        yield fail(what, str(error), start if isinstance(error, InfrastructureError) else "correct it in [rl.serving]")
        return
    if listed is None:
        yield fail(what, "has no list of models", start)
        return
    served = [each.id for each in listed]
    named = ", ".join(served[:5]) + (" ..." if len(served) > 5 else "")
    if model and model not in served:
        yield fail(what, f"serves {named or 'nothing'}, not {model}", "set [rl.serving] model to one of these")
        return
    yield ok(what, f"serves {named}")
    if probe and (asked := model or next(iter(served), "")):
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        with httpx.Client(timeout=SECONDS, headers=headers, trust_env=False) as client:
            yield _probe(client, base_url, asked)


def _probe(client: httpx.Client, base_url: str, model: str) -> Finding:
    what = f"token ids of {model}"
    remedy = "training needs both: use vLLM (return_token_ids) or `openhands-rl serve`"
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Say yes."}],
        "max_tokens": 1,
        "logprobs": True,
        "return_token_ids": True,
    }
    try:
        answer = client.post(f"{base_url}/chat/completions", json=body, timeout=PROBE_SECONDS)
        document = answer.raise_for_status().json()
        choice = document["choices"][0]
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        return fail(what, f"no answer to a request for one token: {describe(error)}", remedy)
    with_ids = bool(document.get("prompt_token_ids")) and bool(choice.get("token_ids"))
    with_logprobs = bool((choice.get("logprobs") or {}).get("content"))
    if with_ids and with_logprobs:
        return ok(what, "come with every answer, and so do logprobs")
    missing = " and ".join(name for name, there in (("ids", with_ids), ("logprobs", with_logprobs)) if not there)
    return fail(what, f"an answer has no {missing}", remedy)


def check_environment_server(url: str) -> Finding:
    """Whether an HTTP server answers; the content is up to the environment."""
    what = f"environment server {url}"
    remedy = "start it, for example with `openhands-rl env webshop`, or change [rl] env_server_base and env_port"
    try:
        answer = httpx.get(url, timeout=SECONDS, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return fail(what, f"no answer: {describe(error)}", remedy)
    if answer.status_code >= 500:
        return warn(what, f"answers {answer.status_code}", "look at the server's own log")
    return ok(what, f"answers ({answer.status_code})")
