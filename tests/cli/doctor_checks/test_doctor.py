"""Checks of an installation, against real servers, folders and processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_model import ScriptedModel, reply, serve, with_prompt_ids

from openhands_rl_plugin import cli
from openhands_rl_plugin.cli.doctor import check_all
from openhands_rl_plugin.testing import example_trajectory
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    """Serves ``base`` and ``bare``, which gives no token ids."""
    with serve() as server:
        server.context = 16_384
        server.script("base", [reply("Yes")])
        server.script("bare", [with_prompt_ids(reply("Yes"), None)])
        yield server


async def checked(folder: Path, text: str) -> dict[str, tuple[str, str]]:
    """How bad it is and what was found, by what was checked, of a file with these lines and a store in ``folder``."""
    config = folder / "config.toml"
    config.write_text(f'{text}\n[rl.storage]\npath = "{folder}/store"\n')
    return {what: (level, found) async for level, what, found in check_all(config)}


async def test_what_is_installed_configured_stored_and_served_is_in_order(model: ScriptedModel, tmp_path: Path) -> None:
    async with FileTrajectoryStorage(tmp_path / "store") as storage:
        await storage.add(example_trajectory(0))
    found = await checked(tmp_path, f'[rl.serving]\nbase_url = "{model.url}"\nmodel = "base"')
    assert found.keys() >= {"package", "host", "training", "bubblewrap"}
    assert found["configuration"][0] == "ok"
    assert found["storage"] == ("ok", f"1 episodes in {tmp_path}/store")
    level, what = found["model server"]
    assert level == "ok" and "token ids and logprobs" in what


@pytest.mark.parametrize(
    ("serving", "why"),
    [
        ('base_url = "URL"\nmodel = "bare"', "completions of bare have no token ids"),
        ('base_url = "URL"\nmodel = "three"', "does not serve three"),
        ('base_url = "http://127.0.0.1:9/v1"', "no model server answers"),
    ],
)
async def test_a_server_that_cannot_be_trained_on_fails(
    serving: str, why: str, model: ScriptedModel, tmp_path: Path
) -> None:
    found = await checked(tmp_path, f"[rl.serving]\n{serving.replace('URL', model.url)}")
    level, what = found["model server"]
    assert level == "fail" and why in what and "[rl.serving]" in what
    assert found["storage"] == ("ok", f"0 episodes in {tmp_path}/store") and not (tmp_path / "store").exists()


@pytest.mark.usefixtures("no_bubblewrap")
def test_a_failed_check_is_the_exit_code_and_a_missing_sandbox_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[rl]\nmax_turns = 0\nenv_port = 0\n")
    assert cli.main(["doctor", "--config", str(config)]) == 1
    printed = capsys.readouterr().out
    assert printed.count("\nfail configuration: ") == 2, "a line for each wrong key"
    assert "\nwarn bubblewrap: bubblewrap is not installed" in printed


async def test_a_database_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_DATABASE", "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=50")
    config = tmp_path / "config.toml"
    config.write_text('[rl]\nstorage_backend = "mongodb"\n[rl.storage]\nuri_env = "A_DATABASE"\n')
    [(level, found)] = [(level, found) async for level, what, found in check_all(config) if what == "storage"]
    assert level == "fail" and "127.0.0.1:1 cannot be reached" in found
