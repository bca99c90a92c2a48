"""The models of an OpenAI-compatible server, from its list: which is the base, how long its context is."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from threading import Timer
from time import monotonic
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError, describe
from openhands_rl_plugin.core.messages import one_line
from openhands_rl_plugin.core.types import Frozen

_MANY = 20
_NOT_OFFERED = (404, 405, 501)


class ServedBase(Frozen):
    """The base model of a server: its name, and the directory of its weights if that is on this machine."""

    name: str
    weights: Path | None


class ListedModel(BaseModel):
    """One entry of ``/v1/models``; ``max_model_len`` is the context in tokens, where the server says it.

    An adapter has its base model as ``parent``, and vLLM's ``root`` is the path that a model was loaded from.
    """

    model_config = ConfigDict(extra="ignore")

    id: str
    root: str | None = None
    parent: str | None = None
    owned_by: str | None = None
    max_model_len: int | None = None


class ListedModels(BaseModel):
    """The answer of ``/v1/models``; some servers answer the bare list."""

    model_config = ConfigDict(extra="ignore")

    data: list[ListedModel]

    @model_validator(mode="before")
    @classmethod
    def _bare_list(cls, value: object) -> object:
        return {"data": value} if isinstance(value, list) else value

    @property
    def bases(self) -> list[ListedModel]:
        """Those that are no adapters."""
        return [model for model in self.data if model.parent is None]


def normalised_url(url: str) -> str:
    """The URL up to and including ``/v1``, also when only ``http://host:port`` was given. Raises ``ConfigError``."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{url!r:.100} is not a URL: {error}") from error
    if not parsed.host:
        raise ConfigError(f'{url!r:.100} names no host; it must look like "http://127.0.0.1:8100/v1"')
    if parsed.userinfo:
        raise ConfigError("the URL of the model holds a password; name its environment variable in api_key_env instead")
    return str(parsed.copy_with(path="/v1")) if parsed.path in ("", "/") else url.rstrip("/")


def served_base(base_url: str, wanted: str, api_key: str | None, timeout: float) -> ServedBase:
    """Find the base model in ``GET {base_url}/models``; ``wanted`` chooses one by name, empty takes the only one.

    Raises ``ConfigError`` when the base model is ambiguous, ``InfrastructureError`` when the server does not answer.
    """
    cards = listed_models(base_url, api_key, timeout)
    if cards is None:
        if wanted:
            return ServedBase(name=wanted, weights=None)
        raise ConfigError(f"{base_url} does not list its models: name one in [rl.serving] model")
    bases = [card for card in cards if card.parent is None]
    found = [card for card in bases if not wanted or card.id == wanted]
    if len(found) != 1:
        names = ", ".join(card.id for card in bases[:_MANY]) or "none"
        problem = f"does not serve a base model {wanted!r}" if wanted else f"serves {len(bases)} base models"
        raise ConfigError(f"{base_url} {problem} (it has: {names}): name one of them in [rl.serving] model")
    return ServedBase(name=found[0].id, weights=local_weights(found[0].root or ""))


def local_weights(path: str | Path) -> Path | None:
    """``path`` when it is a model's directory on this machine."""
    directory = Path(path).expanduser()
    return directory.resolve() if path and (directory / "config.json").is_file() else None


def listed_models(
    base_url: str,
    api_key: str | None,
    timeout: float,
    *,
    key_setting: str = "name the variable that holds it in [rl.serving] api_key_env",
) -> list[ListedModel] | None:
    """The served models, or ``None`` when the server has no such list. ``key_setting``: remedy of a refused key.

    Raises ``InfrastructureError`` when the server does not answer, ``ConfigError`` for a wrong URL or key.
    """
    try:
        answer = models_answer(base_url, api_key, timeout)
    except httpx.TransportError as error:
        raise _away(base_url, error, "the URL") from error
    if answer.status_code in _NOT_OFFERED:
        return None
    if answer.status_code in (401, 403):
        raise ConfigError(f"{base_url} refuses the API key: {key_setting}")
    if not answer.is_success:
        raise InfrastructureError(f"{base_url}/models answered {answer.status_code}; see the server's log")
    try:
        return ListedModels.model_validate_json(answer.content).data
    except ValidationError as error:
        raise ConfigError(
            f"{base_url}/models did not answer a list of models; is it an OpenAI-compatible server?"
        ) from error


def models_answer(base_url: str, api_key: str | None, timeout: float) -> httpx.Response:
    """The response of ``GET {base_url}/models``. Raises ``ConfigError`` for a wrong URL, ``httpx.TransportError``."""
    try:
        with _client(base_url, api_key, timeout) as client:
            return client.get(f"{base_url}/models")
    except httpx.InvalidURL as error:
        raise ConfigError(f"{base_url!r:.100} is not a URL: {error}") from error


def uses_proxy(url: str) -> bool:
    """Whether the environment names a proxy for the URL."""
    parts, proxies = urlsplit(url), getproxies()
    return bool(proxies.get(parts.scheme) or proxies.get("all")) and not proxy_bypass(parts.hostname or "")


@contextmanager
def _client(base_url: str, api_key: str | None, timeout: float) -> Iterator[httpx.Client]:
    """A client whose one request takes ``timeout`` seconds at most. Raises ``httpx.ReadTimeout``."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    secure = base_url.startswith("https:")
    with httpx.Client(headers=headers, timeout=timeout, verify=secure, trust_env=secure) as client:
        limit, end = Timer(timeout, client.close), monotonic() + timeout
        limit.start()
        try:
            yield client
        except httpx.TransportError as error:
            if monotonic() >= end:  # a closed socket fails in several ways
                raise httpx.ReadTimeout(f"the answer is not whole after {timeout:g} s") from error
            raise
        finally:
            limit.cancel()


_SECONDS = 10.0
_PROBE_SECONDS = 60.0
_SHOWN = 5
_PORTS = {"http": 80, "https": 443}


def check_model_server(base_url: str, model: str, api_key: str | None = None, *, named_by: str = "--base-url") -> None:
    """Raise for a server that does not answer, refuses the key, or does not serve ``model``; ``named_by``: the option.

    A server may serve what it does not list (a proxy does), and list nothing: only a refused request for one token says
    that it does not serve it. Raises ``InfrastructureError`` and ``ConfigError``.
    """
    try:
        answer = models_answer(base_url, api_key, _SECONDS)
    except httpx.HTTPError as error:
        if _of_tls(error) or uses_proxy(base_url):
            return  # who sends the completions may be set to trust it, or to go another way
        raise _away(base_url, error, named_by) from error
    if answer.status_code == 401:
        raise ConfigError(
            f"{base_url} refuses the API key ({answer.status_code}): name the variable that holds it with "
            "--api-key-env, or in [llm] api_key"
        )
    if not (served := _listed(answer)) or model in served:
        return
    body = {"model": model, "messages": [{"role": "user", "content": "."}], "max_tokens": 1}
    try:
        with _client(base_url, api_key, _PROBE_SECONDS) as client:
            answer = client.post(f"{base_url}/chat/completions", json=body)
    except httpx.HTTPError:
        return  # what is wrong shows in the episodes
    if 400 <= answer.status_code < 500 and answer.status_code != 429:
        nearest = get_close_matches(model, served, n=1)
        meant = f", did you mean {one_line(nearest[0], 100)}?" if nearest else "."
        known = one_line(", ".join(served[:_SHOWN]), 300) + (", ..." if len(served) > _SHOWN else "")
        raise ConfigError(f"{base_url} does not serve {model}{meant} It has: {known}; name one of them with --model")


def _of_tls(error: BaseException) -> bool:
    below = error.__cause__ or error.__context__
    return isinstance(error, ssl.SSLError) or (below is not None and _of_tls(below))


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
