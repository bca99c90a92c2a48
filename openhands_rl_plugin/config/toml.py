"""``config.toml`` -> ``RLSettings``.

Three sections are merged key by key, later ones override earlier ones: ``[rl]``, ``[extended.rl]``,
``[agent.RLAgent.rl]``. OpenHands warns about a top-level ``[rl]`` unless the plugin is loaded; the others it passes
on to plugins.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import reduce
from importlib.resources import files
from pathlib import Path
from typing import Any

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import ConfigError, Location, unknown_name
from openhands_rl_plugin.core.types import Frozen, JsonObject

SECTIONS: tuple[Location, ...] = (("rl",), ("extended", "rl"), ("agent", "RLAgent", "rl"))
"""The sections that hold settings; later ones override earlier ones."""

Table = Mapping[str, object]


def load_settings(path: Path | None, *, changes: Sequence[str] = ()) -> RLSettings:
    """Read a TOML file, and put ``changes`` over it. A file without any of the sections gives the defaults.

    Raises ``ConfigError`` with one line per wrong setting, which names the file, the section and the remedy; also when
    ``api_key_env`` or ``uri_env`` names a variable that is not set.
    """
    try:
        settings = settings_from_sections(read_document(path) if path else {}, changes)
        settings.serving.api_key()
        if settings.storage_backend == "mongodb":
            settings.storage.connection_string()
    except ConfigError as error:
        where = f"{path}: " if path else ""
        raise ConfigError("\n".join(f"{where}{line}" for line in str(error).splitlines())) from error
    return settings


def has_settings(path: Path) -> bool:
    """Whether the file has any of ``SECTIONS``. Raises ``ConfigError``."""
    document = read_document(path)
    return any(table_of(document, name) is not None for name in SECTIONS)


def settings_from_sections(document: Table, changes: Sequence[str] = ()) -> RLSettings:
    """Merge the sections of a whole configuration document, and ``changes`` (``KEY=VALUE``, see ``changed``) over them.

    Another strategy drops the options of the one before. Raises ``ConfigError``.
    """
    sections = [table for name in SECTIONS if (table := table_of(document, name)) is not None]
    merged, given = reduce(_merge, sections, dict[str, object]()), changed(changes)
    if given.get("rollout_strategy", merged.get("rollout_strategy")) != merged.get("rollout_strategy"):
        merged.pop("strategy", None)
    merged = _merge(merged, given)
    return RLSettings.model_validate(merged)


def changed(changes: Sequence[str]) -> dict[str, object]:
    """``KEY=VALUE``: a key of ``[rl]``, with dots in it below a section, and a value as in TOML, or else a text.

    ``["training.num_epochs=2", "strategy.n=4"]`` is ``{"training": {"num_epochs": 2}, "strategy": {"n": 4}}``.
    """
    found: dict[str, object] = {}
    for each in changes:
        key, _, value = each.partition("=")
        try:
            found = _merge(found, tomllib.loads(each))
        except tomllib.TOMLDecodeError:
            if not re.fullmatch(r"[\w.-]+", key) or "=" not in each:
                raise ConfigError(f"--set {each}: give KEY=VALUE, such as training.learning_rate=1e-5") from None
            found = _merge(found, tomllib.loads(f"{key} = {json.dumps(value)}"))
    return found


def read_document(path: Path) -> Table:
    """The whole file. Raises ``ConfigError``."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError("there is no such file; write one with: openhands-rl doctor --init") from error
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"is not valid TOML: {error}") from error


def table_of(document: Table, name: Location) -> Table | None:
    """A section; ``None`` without it. Raises ``ConfigError`` where it is no table."""
    found: object = document
    for key in name:
        found = found.get(key) if isinstance(found, Mapping) else None
    if found is not None and not isinstance(found, Mapping):
        raise ConfigError(f"[{'.'.join(name)}] must be a table, got {found!r:.80}")
    return found


def llm_keys(document: Table, section: str = "", **given: object) -> dict[str, Any]:
    """The keys of ``[llm]``, then of ``[llm.SECTION]``, then those given: later ones count. Raises ``ConfigError``."""
    table = table_of(document, ("llm",)) or {}
    named = {key: value for key, value in table.items() if isinstance(value, dict)}
    if section and section not in named:
        raise ConfigError(unknown_name("[llm] section", section, named))
    own = {key: value for key, value in table.items() if key not in named}
    return own | named.get(section, {}) | {key: value for key, value in given.items() if value not in (None, "")}


def _merge(below: Table, above: Table) -> dict[str, object]:
    both = {
        key: _merge(under, value)
        for key, value in above.items()
        if isinstance(value, Mapping) and isinstance(under := below.get(key), Mapping)
    }
    return {**below, **above, **both}


def starting_config(*, model: str, base_url: str, workspace: str, prompt: str = "standard") -> str:
    """A file for an OpenHands that works in the folder ``workspace`` with the served ``model`` at ``base_url``."""
    text = files("openhands_rl_plugin.config").joinpath("starting.toml").read_text(encoding="utf-8")
    # A small model seldom ends a completion that went astray, and its context has no room for long ones.
    turns, response, observation = (10, 512, 2048) if prompt == "compact" else (50, 4096, 8192)
    values: JsonObject = {"model": model, "served": f"openai/{model}", "base_url": base_url, "workspace": workspace}
    values |= {"prompt": prompt, "turns": turns, "response": response, "observation": observation}
    # JSON's notation of a string is TOML's, but for this character.
    escaped = {name: json.dumps(value).replace("\x7f", "\\u007f") for name, value in values.items()}
    return re.sub(r"\{(\w+)\}", lambda found: escaped[found[1]], text)


DEFAULT_FILE = Path("config.toml")
NO_KEY = "none"
"""Given to a server that asks for no key, because clients refuse an empty one."""

# For work on a repository, where no file says anything else.
LIMITS: JsonObject = {"max_turns": 50, "max_response_length": 4096, "max_obs_length": 8192}
_PROVIDERS = ("openai/", "hosted_vllm/", "litellm_proxy/", "ollama/", "anthropic/", "gemini/", "openrouter/")


class OwnWork(Frozen):
    """``llm``: the keys of ``[llm]``. ``rl``: the settings that are set, as ``[rl]`` would have them."""

    file: Path | None
    llm: JsonObject
    rl: JsonObject
    settings: RLSettings


def work_of(
    config: Path | None = None,
    changes: Sequence[str] = (),
    *,
    model: str = "",
    base_url: str = "",
    needs_model: bool = True,
) -> OwnWork:
    """Read the file (default: ``./config.toml``, if there is one), with ``changes``, the model and its server over it.

    Raises ``ConfigError``, also without a model where it is needed.
    """
    file = config or (DEFAULT_FILE if DEFAULT_FILE.is_file() else None)
    served = {"model": model, "base_url": base_url}
    changes = [*changes, *(f"serving.{key}={json.dumps(value)}" for key, value in served.items() if value)]
    settings = load_settings(file, changes=changes) if file else settings_from_sections({"rl": {**LIMITS}}, changes)
    llm = llm_keys(read_document(file) if file else {}, base_url=base_url)
    if model:
        prefixed = bool(llm.get("base_url")) and not model.startswith(_PROVIDERS)
        llm["model"] = f"openai/{model}" if prefixed else model
    if settings.serving.api_key_env:
        llm["api_key"] = settings.serving.api_key()
    if llm.get("base_url") and not llm.get("api_key"):
        llm["api_key"] = NO_KEY
    if needs_model and not llm.get("model"):
        raise ConfigError(
            "which model? give --model NAME --base-url URL, or a file with an [llm] section: openhands-rl doctor --init"
        )
    return OwnWork(file=file, llm=llm, rl=settings.model_dump(mode="json", exclude_unset=True), settings=settings)
