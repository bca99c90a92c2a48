"""Whether a model server can be used, asked once before a run."""

from __future__ import annotations

import socket
from difflib import get_close_matches
from urllib.parse import urlsplit

import httpx
from pydantic import ValidationError

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError, describe
from openhands_rl_plugin.core.messages import one_line
from openhands_rl_plugin.models.engines.server_models import ListedModels, uses_proxy

_SECONDS = 10.0
_PROBE_SECONDS = 60.0
_SHOWN = 5
_PORTS = {"http": 80, "https": 443}


def check_model_server(base_url: str, model: str, api_key: str | None = None, *, named_by: str = "--base-url") -> None:
    """Raise for a server that does not answer, refuses the key, or does not serve ``model``; ``named_by``: the option.

    A server may serve what it does not list (a proxy does): only a refused request for one token says that it does
    not. Raises ``InfrastructureError`` and ``ConfigError``.
    """
    secure = base_url.startswith("https:")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(headers=headers, timeout=_SECONDS, verify=secure, trust_env=secure) as client:
        try:
            answer = client.get(f"{base_url}/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _away(base_url, error, named_by) from error
        if answer.status_code in (401, 403):
            raise ConfigError(
                f"{base_url} refuses the API key ({answer.status_code}): name the variable that holds it with "
                "--api-key-env, or in [llm] api_key"
            )
        if (served := _listed(answer)) and model not in served:
            _check_unlisted(client, base_url, model, served)


def check_answers(base_url: str) -> None:
    """Raise ``InfrastructureError`` where nothing listens. Sends nothing, so that it costs the server nothing.

    Behind a proxy, which the engine uses for https, nothing is asked. Raises ``ConfigError`` for a wrong URL.
    """
    try:
        parts = urlsplit(base_url)
        address = (parts.hostname or "", parts.port or _PORTS[parts.scheme])
    except (ValueError, KeyError) as error:
        raise ConfigError(f"--base-url {base_url!r:.100} is not a URL of http or https: {error}") from error
    if parts.scheme == "https" and uses_proxy(base_url):
        return
    try:
        socket.create_connection(address, timeout=_SECONDS).close()
    except OSError as error:
        raise _away(base_url, error, "--base-url") from error


def _away(base_url: str, error: Exception, named_by: str) -> InfrastructureError:
    return InfrastructureError(
        f"no model server answers at {base_url} ({describe(error)}): start it, for example with `openhands-rl serve`, "
        f"or correct {named_by}"
    )


def _listed(answer: httpx.Response) -> list[str]:
    """The names of a list of models; empty for any other answer."""
    try:
        return [each.id for each in ListedModels.model_validate_json(answer.content).data] if answer.is_success else []
    except ValidationError:
        return []


def _check_unlisted(client: httpx.Client, base_url: str, model: str, served: list[str]) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "."}], "max_tokens": 1}
    try:
        answer = client.post(f"{base_url}/chat/completions", json=body, timeout=_PROBE_SECONDS)
    except httpx.HTTPError:
        return  # what is wrong shows in the episodes
    if 400 <= answer.status_code < 500 and answer.status_code != 429:
        nearest = get_close_matches(model, served, n=1)
        meant = f", did you mean {one_line(nearest[0], 100)}?" if nearest else "."
        known = one_line(", ".join(served[:_SHOWN]), 300) + (", ..." if len(served) > _SHOWN else "")
        raise ConfigError(f"{base_url} does not serve {model}{meant} It has: {known}; name one of them with --model")
