from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.environments.http.client import AgentGymClient, WebEnvClient
from openhands_rl_plugin.rollout.strategies.base import StandardReActStrategy
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage


class PlainReward:
    pass


@pytest.fixture
def guest_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with an entry point, as pip leaves one."""
    metadata = tmp_path / "guest-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: guest\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[openhands_rl_plugin.strategies]\nGuest = guest_plugin:Strategy\nBroken = guest_plugin:Nothing\n"
    )
    (tmp_path / "guest_plugin.py").write_text("class Strategy:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "installed", registry.installed.__wrapped__)


@pytest.mark.parametrize("kind", get_args(registry.Kind))
def test_every_name_can_be_loaded(kind: registry.Kind) -> None:
    for name in registry.names(kind):
        registry.target_of(kind, name)
        assert isinstance(registry.find(kind, name), type) or kind not in registry.BUILTINS


def test_options_are_checked_and_handed_over(tmp_path: Path) -> None:
    strategy = registry.build("strategies", "StandardReAct", {"sampling": {"temperature": 0.5}})
    assert isinstance(strategy, StandardReActStrategy)
    assert strategy.options.sampling.temperature == 0.5
    storage = registry.build("storages", "file", {"path": str(tmp_path), "durable": False})
    assert isinstance(storage, FileTrajectoryStorage)
    assert isinstance(registry.build("rewards", f"{__name__}:PlainReward"), PlainReward)


def test_an_installed_package_joins_by_an_entry_point(guest_package: None) -> None:
    assert registry.names("strategies") == ("BestOfN", "Broken", "Guest", "MCTS", "StandardReAct", "ToT")
    assert registry.load("strategies", "Guest").__module__ == "guest_plugin"
    with pytest.raises(ConfigError, match=r"'Broken' cannot be loaded from guest_plugin:Nothing: AttributeError"):
        registry.load("strategies", "Broken")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("webshop", WebEnvClient),
        ("agentgym/babyai", AgentGymClient),
        ("a server of my own", WebEnvClient),
    ],
)
def test_an_environment_without_a_class_speaks_the_simple_protocol(name: str, expected: type) -> None:
    assert registry.load("environments", name) is expected


@pytest.mark.parametrize(
    ("kind", "name", "options", "message"),
    [
        ("strategies", "StandardReact", {}, "unknown strategy 'StandardReact';"),
        ("strategies", "no_such_module:X", {}, "cannot be loaded from no_such_module:X: ModuleNotFoundError"),
        ("rewards", "os:getcwd", {}, "os:getcwd is not a class"),
        ("strategies", "StandardReAct", {"sampling": {"tmp": 1}}, "sampling.tmp: unknown key;"),
        ("storages", "file", {}, "storage 'file': path: is required"),
        ("engines", "openai", {"model": 3, "base_url": "x"}, "engine 'openai': model: must be a valid string, got 3"),
    ],
)
def test_what_is_wrong_is_named(kind: registry.Kind, name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        registry.build(kind, name, options)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_checking_options_checks_those_of_named_plugins_too() -> None:
    options = {"value": "reward", "value_options": {"reward": "success", "reward_options": {"treshold": 1.0}}}
    with pytest.raises(ConfigError, match="reward 'success': treshold: unknown key"):
        RLSettings(rollout_strategy="MCTS", strategy=options)
