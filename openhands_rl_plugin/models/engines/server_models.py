"""The models of an OpenAI-compatible server, from its list: which is the base, how long its context is."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from yarl import URL

from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.core.messages import one_line
from openhands_rl_plugin.core.types import Frozen, JsonObject
from openhands_rl_plugin.models.engines.client import HttpUpstream, ServerError

_MANY = 20


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
        parsed = URL(url)
    except ValueError as error:
        raise ConfigError(f"{url!r:.100} is not a URL: {error}") from error
    if not parsed.host:
        raise ConfigError(f'{url!r:.100} names no host; it must look like "http://127.0.0.1:8100/v1"')
    if parsed.raw_user or parsed.raw_password:
        raise ConfigError("the URL of the model holds a password; name its environment variable in api_key_env instead")
    return str(parsed.with_path("/v1")) if parsed.path == "/" else url.rstrip("/")


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
    base_url: str, api_key: str | None, timeout: float, *, named_by: str = "the URL"
) -> list[ListedModel] | None:
    """The served models, or ``None`` when the server has no such list; ``named_by``: the option of the URL.

    Raises ``InfrastructureError`` when the server does not answer, ``ConfigError`` for a wrong URL or key.
    """
    try:
        return ListedModels.model_validate_json(_fetch(base_url, api_key, timeout, named_by=named_by)).data
    except ValidationError:
        return None
    except ServerError as error:
        if error.status == 401:
            raise ConfigError(
                f"{base_url} refuses the API key ({error.status}): name the variable that holds it in [rl.serving] "
                "api_key_env, with --api-key-env, or in [llm] api_key"
            ) from error
        if error.headers is not None:  # it answers, and may serve what it does not list
            return None
        # The first words are those of OpenAI's client, for litellm.
        problem = str(error).removeprefix("Connection error: ")
        raise InfrastructureError(f"{problem} Or correct {named_by}.") from error


def _fetch(
    base_url: str,
    api_key: str | None,
    timeout: float,
    *,
    path: str = "models",
    body: JsonObject | None = None,
    named_by: str,
) -> bytes:
    """The body of an answer. Raises ``ServerError``, and ``ConfigError`` for a wrong URL."""
    try:
        if (parts := urlsplit(base_url)).scheme not in ("http", "https") or parts.port == 0:
            raise ValueError("it has to begin with http:// or https://")
        return background().wait_for(HttpUpstream(base_url, api_key, timeout).ask(path, body))
    except ValueError as error:
        raise ConfigError(f"{named_by} {base_url!r:.100} is not a URL: {error}") from error


_SECONDS = 10.0
_PROBE_SECONDS = 60.0
_SHOWN = 5


def check_model_server(base_url: str, model: str, api_key: str | None = None, *, named_by: str = "--base-url") -> None:
    """Raise for a server that does not answer, refuses the key, or does not serve ``model``; ``named_by``: the option.

    A server may serve what it does not list (a proxy does), and list nothing: only a refused request for one token says
    that it does not serve it. Raises ``InfrastructureError`` and ``ConfigError``.
    """
    served = check_answers(base_url, api_key, named_by=named_by)
    if not served or model in served:
        return
    body = {"model": model, "messages": [{"role": "user", "content": "."}], "max_tokens": 1}
    try:
        _fetch(base_url, api_key, _PROBE_SECONDS, path="chat/completions", body=body, named_by=named_by)
    except ServerError as error:
        if error.headers is None or error.is_temporary:
            return  # what is wrong shows in the episodes
        nearest = get_close_matches(model, served, n=1)
        meant = f", did you mean {one_line(nearest[0], 100)}?" if nearest else "."
        known = one_line(", ".join(served[:_SHOWN]), 300) + (", ..." if len(served) > _SHOWN else "")
        raise ConfigError(
            f"{base_url} does not serve {model}{meant} It has: {known}; name one of them with --model"
        ) from error


def check_answers(base_url: str, api_key: str | None = None, *, named_by: str = "--base-url") -> list[str]:
    """The names that a server lists; none for one without such a list.

    Raises ``InfrastructureError`` where nothing answers, ``ConfigError`` for a wrong URL or key.
    """
    return [each.id for each in listed_models(base_url, api_key, _SECONDS, named_by=named_by) or ()]
