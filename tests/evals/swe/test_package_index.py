"""What a set-up is given to install packages, and that nothing else sees it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from openhands_rl_plugin.evals.swe.backends.interpreters import find_python
from openhands_rl_plugin.evals.swe.backends.sandbox import InstanceSandbox, Room

TOKEN = "tok-2f9d81c7e4"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with a private index, whose address and login stand in every place that pip and uv read."""
    home = tmp_path / "home"
    for name, text in {
        ".config/pip/pip.conf": f"[global]\nindex-url = https://me:{TOKEN}1@index.example/simple\n",
        ".config/uv/uv.toml": f'[[index]]\nurl = "https://me:{TOKEN}2@index.example/simple"\n',
        ".netrc": f"machine index.example login me password {TOKEN}3\n",
    }.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"https://me:{TOKEN}4@index.example/simple")
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:{TOKEN}5@proxy.example:3128")
    return home


@pytest.fixture
def wrap(home: Path, tmp_path: Path):
    (tmp_path / "layer").mkdir()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    sandbox = InstanceSandbox(find_python(version), "")
    room = Room(tmp_path / "layer", tmp_path)
    return lambda **options: " ".join(sandbox.wrap(room, ["true"], **options))


def test_a_set_up_has_the_index_and_its_logins(wrap, home: Path, tmp_path: Path):
    line = wrap(network=True, setup=True)
    assert f"{TOKEN}4" in line and f"{TOKEN}5" in line
    assert all(f"{home}/{name}" in line for name in (".config/pip/pip.conf", ".config/uv/uv.toml", ".netrc"))


@pytest.mark.parametrize("network", [False, True])
def test_tests_have_neither_also_with_a_network(wrap, home: Path, tmp_path: Path, network: bool):
    line = wrap(network=network)
    assert TOKEN not in line and str(home) not in line
    assert "/etc/pip.conf" not in line and "PIP_EXTRA_INDEX_URL" not in line
