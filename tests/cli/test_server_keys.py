"""The one rule of all servers, as a user meets it: a line, before anything is loaded."""

from __future__ import annotations

import pytest

from openhands_rl_plugin.cli import main

SERVERS = {
    "serve": ["--model", "no-such-model"],
    "gateway": ["--upstream", "http://127.0.0.1:9/v1", "--store", "./never-made"],
    "studio": ["mongodb://127.0.0.1:9/never"],
    "env": ["webshop"],
}


@pytest.mark.parametrize("command", SERVERS)
def test_a_public_address_needs_a_key(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENHANDS_RL_API_KEY", raising=False)
    assert main([command, *SERVERS[command], "--host", "0.0.0.0", "--port", "0"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: --host 0.0.0.0: others on the network could use") and printed.count("\n") == 1
    assert "OPENHANDS_RL_API_KEY" in printed and not list(tmp_path.iterdir())
