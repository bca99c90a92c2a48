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
from collections.abc import Mapping
from functools import reduce
from importlib.resources import files
from pathlib import Path

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import ConfigError, Location

SECTIONS: tuple[Location, ...] = (("rl",), ("extended", "rl"), ("agent", "RLAgent", "rl"))
"""The sections that hold settings; later ones override earlier ones."""

Table = Mapping[str, object]


def load_settings(path: Path, environ: Mapping[str, str] | None = None) -> RLSettings:
    """Read a TOML file. A file without any of the sections gives the defaults.

    Raises ``ConfigError`` with one line per wrong setting, which names the file, the section and the remedy; also when
    ``api_key_env`` or ``uri_env`` names a variable that is not set in ``environ`` (default: the process's).
    """
    try:
        settings = settings_from_sections(read_document(path))
        secrets = os.environ if environ is None else environ
        settings.serving.api_key(secrets)
        if settings.storage_backend == "mongodb":
            settings.storage.connection_string(secrets)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from error
    return settings


def has_settings(path: Path) -> bool:
    """Whether the file has any of ``SECTIONS``. Raises ``ConfigError``."""
    document = read_document(path)
    return any(table_of(document, name) is not None for name in SECTIONS)


def settings_from_sections(document: Table) -> RLSettings:
    """Merge the sections of a whole configuration document. Raises ``ConfigError``."""
    sections = {name: table for name in SECTIONS if (table := table_of(document, name)) is not None}
    merged = reduce(_merge, sections.values(), dict[str, object]())

    def locate(location: Location) -> str:
        holders = [name for name, table in sections.items() if _holds(table, location)]
        return f"[{'.'.join((holders or [('rl',)])[-1] + location[:-1])}]"

    return RLSettings.model_validate(merged, context={"locate": locate})


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


def _holds(table: object, location: Location) -> bool:
    for key in location:
        if not isinstance(table, Mapping) or key not in table:
            return False
        table = table[key]
    return True


def starting_config(*, model: str, base_url: str, workspace: str, prompt: str = "standard") -> str:
    """A file for an OpenHands that works in the folder ``workspace`` with the served ``model`` at ``base_url``."""
    text = files("openhands_rl_plugin.config").joinpath("starting.toml").read_text(encoding="utf-8")
    served = f"openai/{model}"
    values = {"model": model, "served": served, "base_url": base_url, "workspace": workspace, "prompt": prompt}
    # JSON's notation of a string is TOML's, but for this character.
    escaped = {name: json.dumps(value).replace("\x7f", "\\u007f") for name, value in values.items()}
    return re.sub(r"\{(\w+)\}", lambda found: escaped[found[1]], text)
