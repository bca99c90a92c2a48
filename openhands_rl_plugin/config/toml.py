"""``config.toml`` -> ``RLSettings``.

Three sections are merged key by key, later ones override earlier ones: ``[rl]``, ``[extended.rl]``,
``[agent.RLAgent.rl]``. OpenHands warns about a top-level ``[rl]`` unless the plugin is loaded; the others it passes
on to plugins.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import reduce
from importlib.resources import files
from pathlib import Path

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import ConfigError, Location
from openhands_rl_plugin.core.types import JsonObject

SECTIONS: tuple[Location, ...] = (("rl",), ("extended", "rl"), ("agent", "RLAgent", "rl"))
"""The sections that hold settings; later ones override earlier ones."""

Table = Mapping[str, object]


def load_settings(
    path: Path | None, environ: Mapping[str, str] | None = None, *, changes: Sequence[str] = ()
) -> RLSettings:
    """Read a TOML file, and put ``changes`` over it. A file without any of the sections gives the defaults.

    Raises ``ConfigError`` with one line per wrong setting, which names the file, the section and the remedy; also when
    ``api_key_env`` or ``uri_env`` names a variable that is not set in ``environ`` (default: the process's).
    """
    try:
        settings = settings_from_sections(read_document(path) if path else {}, changes)
        secrets = os.environ if environ is None else environ
        settings.serving.api_key(secrets)
        if settings.storage_backend == "mongodb":
            settings.storage.connection_string(secrets)
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
