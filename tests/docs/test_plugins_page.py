"""The page about plugins is true for all five interfaces: its classes, installed as a package, run one episode."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from page_session import DOCS, blocks, title_of
from scripted_model import ScriptedModel, reply, serve

SECTIONS = ("strategy", "world", "reward", "storage", "engine")
BUILD = "from setuptools.build_meta import build_wheel; print(build_wheel('.'))"
PLAY = """
import json, sys
from openhands_rl_plugin import RLAgent, RLAgentConfig

with RLAgent("model", config=RLAgentConfig.model_validate(json.load(sys.stdin))) as agent:
    (episode,) = agent.run("Guess.")
print(json.dumps({"reward": episode["reward"], "stop": episode["stop"]}))
"""


def python(folder: Path, code: str, paths: str = "", given: str = "") -> str:
    """What a program prints that finds only installed packages and ``paths``, in ``folder``."""
    environ = {**os.environ, "HOME": str(folder), "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=environ, input=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def settings(files: dict[str, str], names: dict[str, str]) -> dict[str, object]:
    """The page's five settings in one, with short names in the place of classes."""
    merged: dict[str, object] = {}
    for section in SECTIONS:
        text = files[f"{section}.toml"]
        used = [target for target in names if f'"{target}"' in text]
        assert len(used) == 1, section
        for key, value in tomllib.loads(text.replace(used[0], names[used[0]]))["rl"].items():
            merged[key] = value
    return merged


def guesses(body: dict) -> dict:
    """Three wrong answers, and then the number of the first task."""
    return reply("9531"[sum(message["role"] == "assistant" for message in body["messages"])])


@pytest.mark.slow
def test_five_plugins_of_one_package_play_an_episode(tmp_path: Path) -> None:
    pages = (DOCS / "howto/plugins.md", DOCS / "howto/plugin-packages.md")
    files = {title_of(each): str(each.parsed) for page in pages for each in blocks(page) if title_of(each)}
    source, site, home = tmp_path / "source", tmp_path / "site", tmp_path / "home"
    source.mkdir(), home.mkdir()
    for name, text in files.items():
        (source / name).write_text(text)
    with zipfile.ZipFile(source / python(source, BUILD)) as wheel:
        wheel.extractall(site)

    groups = tomllib.loads(files["pyproject.toml"])["project"]["entry-points"]
    kinds = {group.rpartition(".")[2] for group in groups}
    assert kinds == set(re.findall(r"^\| (\w+) \| `\[", pages[0].read_text(), re.MULTILINE))
    names = {target: name for points in groups.values() for name, target in points.items()}

    with serve() as model:
        model.policies["model"] = guesses
        asked = settings(files, names)
        asked["engine_options"] = {"second_url": model.url}
        asked["serving"] = {"base_url": "http://127.0.0.1:9/v1", "model": "model", "adapters_path": "adapters"}
        asked["max_turns"] = 5
        result = json.loads(python(home, PLAY, str(site), json.dumps(asked)))
        check(model, result, home)


def check(model: ScriptedModel, result: dict[str, object], home: Path) -> None:
    """Each of the five had its say."""
    # The environment ended, with a reward, for the number of the fourth turn; the reward function wants three.
    assert result == {"reward": 0.0, "stop": "terminated"}
    assert len(model.requests["model"]) == 2 * 4  # the strategy asks twice a turn, the engine its second server
    assert (home / "trajectories/shop/trajectories.sqlite").exists()
