"""The example plugin of the documentation: found by its entry point, conforming, and used by an agent."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_model import ScriptedModel, reply, serve

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.hosts.shared.sessions import check_engine_setting
from openhands_rl_plugin.testing import check_engine

PLUGIN = Path(__file__).parents[2] / "docs/examples/fallback_engine"
AWAY = "http://127.0.0.1:9/v1"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package as pip leaves it: its modules, and its metadata with the entry points of its pyproject.toml."""
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    folder = tmp_path / "fallback_engine-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = (f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in points.items()) for group, points in groups)
    (folder / "entry_points.txt").write_text("".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(PLUGIN))
    monkeypatch.setattr(registry, "installed", registry.installed.__wrapped__)


@pytest.fixture
def server() -> Iterator[ScriptedModel]:
    with serve() as model:
        model.policies["m"] = lambda body: reply("right" if len(body["messages"]) // 2 % 2 else "down")
        yield model


async def test_it_is_an_engine(installed: None, server: ScriptedModel) -> None:
    options = {"model": "m", "base_url": AWAY, "second_url": server.url, "timeout": 5.0}
    engine = registry.build("engines", "fallback", options)
    await check_engine(engine, away=registry.build("engines", "fallback", {**options, "second_url": AWAY}))
    await engine.aclose()


def test_openhands_refuses_an_engine_that_it_would_not_use(installed: None) -> None:
    chosen = RLSettings.model_validate({"engine": "fallback", "engine_options": {"second_url": AWAY}})
    with pytest.raises(ConfigError, match="'fallback' would not be used"):
        check_engine_setting(chosen)
    check_engine_setting(RLSettings())
