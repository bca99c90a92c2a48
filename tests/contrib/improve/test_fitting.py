"""Prompt and lengths follow from the model's context."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.contrib.improve.price import check_room, choose_prompt, context_of, fitted
from openhands_rl_plugin.core.errors import ConfigError

TOOLS = "{% if tools %}{{ tools }}{% endif %}"


def model(folder: Path, context: int, template: str = TOOLS) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": context}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def sized(folder: Path, context: int, template: str = TOOLS) -> tuple[RLSettings, tuple[bool, bool]]:
    choice = choose_prompt(RLSettings(), model(folder, context, template), context, None)
    settings = fitted(RLSettings(), choice, chosen=False)
    check_room(settings, choice, "What is wrong. " * 40)
    assert settings.max_prompt_length + settings.max_response_length <= context
    return settings, (settings.workspace.is_compact, choice.native)


def test_a_short_context_takes_the_compact_prompt_and_calls_in_the_text(tmp_path: Path) -> None:
    settings, chosen = sized(tmp_path, 8192)
    assert chosen == (True, False) and settings.max_response_length == 512
    assert sized(tmp_path, 32_768)[1] == (False, True)
    assert sized(tmp_path, 32_768, "{{ messages }}")[1] == (False, False)
    assert sized(tmp_path, 1_000_000)[0].max_prompt_length < 65_536


def test_a_context_without_room_is_refused_in_one_line(tmp_path: Path) -> None:
    path = model(tmp_path, 1024)
    choice = choose_prompt(RLSettings(), path, context_of(path), None)
    with pytest.raises(ConfigError, match="choose a model with a longer context") as refused:
        check_room(fitted(RLSettings(), choice, chosen=False), choice)
    assert "\n" not in str(refused.value)
    path = model(tmp_path, 8192)
    choice = choose_prompt(RLSettings(), path, context_of(path), None)
    with pytest.raises(ConfigError, match=r"raise \[rl\] max_prompt_length"):
        check_room(fitted(RLSettings(max_prompt_length=1000), choice, chosen=True), choice)
