"""The models of an OpenAI-compatible server, from its list: which is the base, how long its context is."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.models.engines.client import HttpUpstream, ServerError

_MANY = 20
_PROBE_SECONDS = 60.0


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


def with_version(url: str) -> str:
    """The URL with ``/v1``, where it has no path of its own."""
    return url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1"


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
    base_url: str, api_key: str | None, timeout: float = 10.0, *, named_by: str = "--base-url"
) -> list[ListedModel] | None:
    """The served models, or ``None`` when the server has no such list; ``named_by``: the option of the URL.

    Raises ``InfrastructureError`` when the server does not answer, ``ConfigError`` for a wrong URL or key.
    """
    try:
        if urlsplit(base_url).scheme not in ("http", "https"):
            raise ValueError("it has to begin with http:// or https://")
        answer = background().wait_for(HttpUpstream(base_url, api_key, timeout).ask("models"))
        return ListedModels.model_validate_json(answer).data
    except ValidationError:
        return None
    except ValueError as error:
        raise ConfigError(f"{named_by} {base_url!r:.100} is not a URL: {error}") from error
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


def check_model_server(base_url: str, model: str, api_key: str | None = None, *, named_by: str = "--base-url") -> None:
    """Raise as ``listed_models``, and ``ConfigError`` for a server that does not serve ``model``.

    A server may serve what it does not list: only a refused request for one token says that it does not.
    """
    served = [each.id for each in listed_models(base_url, api_key, named_by=named_by) or ()]
    if not served or model in served:
        return
    body = {"model": model, "messages": [{"role": "user", "content": "."}], "max_tokens": 1}
    try:
        background().wait_for(HttpUpstream(base_url, api_key, _PROBE_SECONDS).send(body))
    except ServerError as error:
        if error.headers is not None and not error.is_temporary:  # what else is wrong shows in the episodes
            known = ", ".join(served[:_MANY])
            raise ConfigError(f"{base_url} does not serve {model}. It has: {known}; name one with --model") from error
