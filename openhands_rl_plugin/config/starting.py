"""A whole ``config.toml`` to start from: the commented example of every key, with a few values filled in."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.resources import files

# For work on a repository; the defaults are made for the short conversations of text environments.
_WORKSPACE_LIMITS: Mapping[str, object] = {"max_turns": 50, "max_response_length": 4096, "max_obs_length": 8192}


def example() -> str:
    """The commented example: every key of ``[rl]`` at its default, and what OpenHands needs beside it."""
    return files("openhands_rl_plugin.config").joinpath("example.toml").read_text(encoding="utf-8")


def starting_config(*, model: str, base_url: str, workspace: str) -> str:
    """The example for an OpenHands that works in the folder ``workspace`` with the served ``model`` at ``base_url``."""
    return _filled_in(
        example(),
        {
            "core": {"workspace_base": workspace},
            "llm": {"model": f"openai/{model}", "base_url": base_url},
            "rl": _WORKSPACE_LIMITS,
            "rl.serving": {"base_url": base_url, "model": model},
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
