from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from openhands_rl_plugin import FileTrajectoryStorage, RLAgentConfig
from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.build import open_storage
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.core.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "config.toml.example"


def load(tmp_path: Path, text: str) -> RLSettings:
    file = tmp_path / "config.toml"
    file.write_text(text)
    return load_settings(file)


def refusal(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, text)
    lines = str(raised.value).splitlines()
    assert all(line.startswith(f"{tmp_path / 'config.toml'}: ") for line in lines)
    return [line.removeprefix(f"{tmp_path / 'config.toml'}: ") for line in lines]


def test_the_original_eleven_keys_keep_their_defaults() -> None:
    assert RLAgentConfig is RLSettings
    original = {
        "max_turns": 10,
        "max_prompt_length": 2048,
        "max_response_length": 512,
        "max_obs_length": 1024,
        "react_format": True,
        "env_name": "webshop",
        "env_port": 8000,
        "env_server_base": "http://127.0.0.1",
        "rollout_strategy": "StandardReAct",
        "storage_backend": "file",
        "max_workers": 10,
    }
    assert RLAgentConfig().model_dump(include=set(original)) == original


def test_the_example_lists_every_key_with_its_default() -> None:
    sections = {name: registry.load("sections", name)() for name in registry.names("sections")}
    assert load_settings(EXAMPLE) == RLSettings.model_validate(sections)
    # The seed stands in a comment: with it, every run of a task would be the same run.
    text = re.sub(r"# (seed = 0 +# of the run)", r"\1", EXAMPLE.read_text())
    assert _keys(tomllib.loads(text)["rl"]) == _keys(RLSettings.model_validate(sections).model_dump())


def _keys(table: dict[str, object]) -> dict[str, object]:
    return {key: _keys(value) if isinstance(value, dict) else None for key, value in table.items()}


def test_later_sections_override_earlier_ones_key_by_key(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        """
        [rl]
        max_turns = 1
        max_workers = 1
        env_port = 1
        [rl.training]
        num_epochs = 1
        batch_size = 1
        [extended.rl]
        max_turns = 2
        max_workers = 2
        [extended.rl.training]
        num_epochs = 2
        [agent.RLAgent.rl]
        max_turns = 3
        """,
    )
    assert (settings.max_turns, settings.max_workers, settings.env_port) == (3, 2, 1)
    assert (settings.training.num_epochs, settings.training.batch_size) == (2, 1)


def test_the_port_is_added_unless_the_address_has_one() -> None:
    bases = ("http://shop.example", "https://shop.example:9000", "http://shop.example/prefix")
    urls = ["http://shop.example:8000", "https://shop.example:9000", "http://shop.example:8000/prefix"]
    assert [RLSettings(env_server_base=base).environment_url for base in bases] == urls


WRONG = [
    ("[rl]\nmax_turn = 3", "[rl] max_turn: unknown key;"),
    ('[rl]\nmax_turns = "3"', "[rl] max_turns: must be a valid integer, got '3'"),
    ('[rl]\nenv_server_base = "127.0.0.1"', "[rl] env_server_base: must be an http:// or https:// URL"),
    ('[rl]\nrollout_strategy = "Greedy"', "[rl] rollout_strategy: unknown strategy 'Greedy'; available: BestOfN, MCTS"),
    ('[rl.storage]\nuri_env = "mongodb://h/"', "[rl.storage] uri_env: must be the NAME of an environment variable"),
    ("[agent.RLAgent.rl.sampling]\ntop_p = 0", "[rl.sampling] top_p: must be greater than 0, got 0"),
    ('[rl.serving]\nadapter = "../evil"', "[rl.serving] adapter: may hold letters, digits"),
    (
        '[rl]\nrollout_strategy = "MCTS"\n[rl.strategy]\nexploration_weight = -1.0',
        "strategy 'MCTS': exploration_weight: must",
    ),
    ('[rl.reward]\nname = "verifier"', "reward 'verifier': adapter: is required"),
]


@pytest.mark.parametrize(("text", "expected"), WRONG, ids=[text.replace("\n", " ") for text, _ in WRONG])
def test_a_wrong_value_gives_one_line(tmp_path: Path, text: str, expected: str) -> None:
    (line,) = refusal(tmp_path, text)
    assert line.startswith(expected)


def test_every_wrong_value_is_reported(tmp_path: Path) -> None:
    lines = refusal(tmp_path, "[rl]\nmax_turns = 0\nmax_workers = 0\n[agent.RLAgent.rl]\nmax_workers = -1\n")
    assert [line.partition(": ")[0] for line in lines] == ["[rl] max_turns", "[rl] max_workers"]


def test_a_strategy_of_ones_own_has_options_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "careful.py").write_text("class Careful:\n    def __init__(self, votes: int = 3) -> None: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = '[rl]\nrollout_strategy = "careful:Careful"\nstrategy = {votes = 5}\n'
    assert load(tmp_path, text).strategy == {"votes": 5}
    (line,) = refusal(tmp_path, text.replace("votes", "vote"))
    assert line.startswith("strategy 'careful:Careful': vote: unknown key;")


SECRETS = [
    '[rl.serving]\napi_key = "sk-very-secret"',
    '[rl]\npassword = "sk-very-secret"',
    '[rl.storage]\nmongodb_token = "sk-very-secret"',
    '[rl.storage]\nmongodb_uri = "mongodb://me:sk-very-secret@host/"',
    '[rl.serving]\nbase_url = "http://me:sk-very-secret@host/v1"',
    '[rl.serving]\napi_key_env = "sk-very-secret"',
]


@pytest.mark.parametrize("text", SECRETS, ids=[text.replace("\n", " ") for text in SECRETS])
def test_secrets_are_refused_with_the_remedy_and_not_repeated(tmp_path: Path, text: str) -> None:
    (line,) = refusal(tmp_path, text)
    assert "environment variable" in line
    assert "sk-very-secret" not in line


def test_a_key_is_read_from_the_variable_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '[rl.serving]\napi_key_env = "SHOP_KEY"\n'
    monkeypatch.setenv("SHOP_KEY", "sk-1")
    settings = load(tmp_path, text)
    assert settings.serving.api_key() == "sk-1" and "sk-1" not in settings.model_dump_json()
    monkeypatch.delenv("SHOP_KEY")
    (line,) = refusal(tmp_path, text)
    assert line.startswith("[rl.serving] api_key_env: the environment variable SHOP_KEY is not set; export SHOP_KEY=")


def test_a_file_that_cannot_be_read_is_an_error_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing.toml: there is no such file; write one with: openhands-rl doctor"):
        load_settings(tmp_path / "missing.toml")
    assert refusal(tmp_path, "[rl")[0].startswith("is not valid TOML: ")


class LabelledStorage(FileTrajectoryStorage):
    """A storage of another package, with an option of its own."""

    def __init__(self, path: str, label: str) -> None:
        super().__init__(path)
        self.label = label


def test_a_storage_of_another_package_has_options_of_its_own(tmp_path: Path) -> None:
    own = f"""
        [rl]
        storage_backend = "{__name__}:LabelledStorage"
        [rl.storage]
        path = "{tmp_path}"
    """
    storage = open_storage(load(tmp_path, f'{own}\noptions = {{ label = "night" }}'))
    assert isinstance(storage, LabelledStorage) and storage.label == "night"
    with pytest.raises(ConfigError, match="label: is required"):
        open_storage(load(tmp_path, own))
