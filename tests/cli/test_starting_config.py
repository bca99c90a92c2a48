"""``openhands-rl doctor --init``: a whole, commented file, which OpenHands and the plugin read."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from openhands_rl_plugin import cli
from openhands_rl_plugin.config.toml import load_settings

ROOT = Path(__file__).parents[2]
URL = "http://127.0.0.1:8123/v1"


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    words = ["doctor", "--init", "--model", 'a "quoted" name', "--base-url", URL, "--workspace", "./my repository"]
    assert cli.main(words) == 0
    return tmp_path / "config.toml"


def test_the_file_is_short_and_names_model_server_and_workspace(written: Path) -> None:
    document = tomllib.loads(written.read_text())
    assert document["llm"]["model"] == 'openai/a "quoted" name'
    assert document["llm"]["base_url"] == document["rl"]["serving"]["base_url"] == URL
    assert document["core"]["workspace_base"] == "./my repository"
    settings = load_settings(written)
    assert settings.serving.model == 'a "quoted" name'
    assert "seed" not in settings.sampling.model_fields_set, "the same task would be sampled the same way in every run"
    text, example = written.read_text(), tomllib.loads((ROOT / "config.toml.example").read_text())
    assert len(text.splitlines()) <= 40
    for name, table in tomllib.loads(text).items():
        for key, value in table.items():
            assert key in example[name] and (not isinstance(value, dict) or value.keys() <= example[name][key].keys())


def test_openhands_reads_the_file_without_a_complaint(written: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("openhands.core")
    from openhands.core.config import OpenHandsConfig
    from openhands.core.config.utils import finalize_config, load_from_toml
    from openhands.core.logger import openhands_logger

    config = OpenHandsConfig()
    openhands_logger.addHandler(caplog.handler)
    try:
        load_from_toml(config, str(written))
        finalize_config(config)
    finally:
        openhands_logger.removeHandler(caplog.handler)
    logged = [record.getMessage() for record in caplog.records if "Unknown section [rl]" not in record.getMessage()]
    assert not logged
    assert config.default_agent == "RLAgent" and config.get_llm_config().base_url == URL
    assert config.workspace_base == str(written.parent / "my repository")


def test_a_file_that_is_there_stays_as_it_is(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written.write_text("# mine\n")
    capsys.readouterr()
    assert cli.main(["doctor", "--init"]) == 1
    assert capsys.readouterr().err.startswith("error: config.toml cannot be written: File exists")
    assert written.read_text() == "# mine\n"
