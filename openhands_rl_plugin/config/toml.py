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
from collections.abc import Iterator, Mapping
from datetime import date, time
from functools import reduce
from importlib.resources import files
from pathlib import Path

from openhands_rl_plugin.config import registry
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
        raise ConfigError("there is no such file; write one with: openhands-rl config init") from error
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


def toml_of(document: Table) -> str:
    """A document as TOML; without comments, and ``None`` is left out."""
    return "\n".join(_lines((), document)).strip() + "\n"


def _lines(name: tuple[str, ...], table: Table) -> Iterator[str]:
    if name:
        yield f"\n[{'.'.join(map(_key, name))}]"
    yield from (
        f"{_key(key)} = {_value(value)}"
        for key, value in table.items()
        if not isinstance(value, Mapping) and value is not None
    )
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _lines((*name, key), value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def _value(value: object) -> str:
    if isinstance(value, str):
        # JSON's notation of a string is TOML's, but for this character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return value.isoformat() if isinstance(value, date | time) else str(value)


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


# For work on a repository; the defaults are made for the short conversations of text environments.
_WORKSPACE_LIMITS: Mapping[str, object] = {"max_turns": 50, "max_response_length": 4096, "max_obs_length": 8192}


def example() -> str:
    """The commented example: every key of ``[rl]`` at its default, and what OpenHands needs beside it.

    It has no section whose reader is not installed.
    """
    text = files("openhands_rl_plugin.config").joinpath("example.toml").read_text(encoding="utf-8")
    for name in {*re.findall(r"(?m)^\[rl\.(\w+)\]", text)} - {*RLSettings.model_fields}:
        try:
            registry.find("sections", name)
        except ConfigError:
            text = re.sub(rf"(?ms)^\[rl\.{name}\].*?(?=^\[)", "", text)
    return text


def starting_config(*, model: str, base_url: str, workspace: str, prompt: str = "standard") -> str:
    """The example for an OpenHands that works in the folder ``workspace`` with the served ``model`` at ``base_url``."""
    return _filled_in(
        example(),
        {
            "core": {"workspace_base": workspace},
            "llm": {"model": f"openai/{model}", "base_url": base_url},
            "rl": _WORKSPACE_LIMITS,
            "rl.serving": {"base_url": base_url, "model": model},
            "rl.workspace": {"prompt": prompt},
        },
    )


def _filled_in(text: str, values: Mapping[str, Mapping[str, object]]) -> str:
    """``text`` with other values for keys that it has. The comments behind them stay in their column."""
    lines, section, filled = [], "", 0
    for line in text.splitlines():
        if header := re.match(r"\[([\w.]+)\]", line):
            section = header[1]
        key = re.match(r"(\w+) = ", line)
        if key and key[1] in values.get(section, {}):
            # JSON and TOML have the same notation of strings and numbers.
            setting = f"{key[1]} = {json.dumps(values[section][key[1]])}"
            comment = line[line.index("#") :] if "#" in line else ""
            line, filled = f"{setting:<41} {comment}".rstrip(), filled + 1
        lines.append(line)
    assert filled == sum(map(len, values.values())), "the example has every key that is filled in"
    return "\n".join(lines) + "\n"
