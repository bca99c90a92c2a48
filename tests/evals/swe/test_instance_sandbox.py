"""The sandbox of an instance: who sees the user's package index, and what bounds a run. The bombs are small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from needs import needs_bubblewrap

from openhands_rl_plugin.environments.workspace.sandbox import SandboxLimits
from openhands_rl_plugin.evals.swe.backends import InstanceSandbox, find_python

TOKEN = "tok-2f9d81c7e4"
MEBIBYTE = 1024**2
LIMITS = SandboxLimits(memory=128 * MEBIBYTE, file=MEBIBYTE)


@pytest.fixture
def wrap(tmp_path: Path):
    for name in ("layer/testbed", "layer/root", "layer/conda", "tmp"):
        (tmp_path / name).mkdir(parents=True)
    python = find_python(f"{sys.version_info.major}.{sys.version_info.minor}")
    sandbox = InstanceSandbox(python, "", tmp_path / "layer", tmp_path / "tmp", limits=LIMITS)
    return lambda *command, **options: sandbox.wrap(command or ["true"], **options)


def test_a_set_up_has_the_index_and_its_logins_and_nothing_else_has(wrap, tmp_path: Path, monkeypatch) -> None:
    home = tmp_path / "home"
    for number, name in enumerate((".config/pip/pip.conf", ".config/uv/uv.toml", ".netrc")):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(f"index-url = https://me:{TOKEN}{number}@index.example/simple\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"https://me:{TOKEN}4@index.example/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:{TOKEN}5@proxy.example:3128")
    line = " ".join(wrap(network=True, setup=True))
    assert f"{TOKEN}4" in line and f"{TOKEN}5" in line and f"--ro-bind-try {tmp_path} " in line
    assert all(f"{home}/{name}" in line for name in (".config/pip/pip.conf", ".config/uv/uv.toml", ".netrc"))
    others = [wrap(network=False), wrap(network=True)]
    assert all(TOKEN not in " ".join(each) and str(home) not in " ".join(each) for each in others)
    assert "/etc/pip.conf" not in others[1] and "PIP_EXTRA_INDEX_URL" not in others[1]


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("head -c 200M /dev/zero | tail -c 200M | wc -c", "memory exhausted"),
        ("head -c 2M /dev/zero > big", "File size limit exceeded"),
    ],
)
@needs_bubblewrap
def test_who_goes_beyond_a_limit_is_ended(wrap, command: str, why: str) -> None:
    words = wrap("bash", "-c", command, network=False)
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    assert why in done.stderr, done
