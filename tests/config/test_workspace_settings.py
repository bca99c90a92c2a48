"""``[rl.workspace]``: which of the host's paths may be shown, and how a wrong one is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from openhands_rl_plugin.config.rl import checked_path
from openhands_rl_plugin.config.toml import settings_from_sections
from openhands_rl_plugin.core.errors import ConfigError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "users" / "me"
    (home / "projects").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    return home


def workspace(**keys: object):
    return settings_from_sections({"rl": {"workspace": keys}}).workspace


def test_a_folder_of_a_home_is_shown_by_its_real_path(home: Path):
    (home / "link").symlink_to("projects")
    assert [*map(checked_path, workspace(visible=["~/projects"]).visible)] == [home / "projects"]
    assert [*map(checked_path, workspace(writable=["~/link"]).writable)] == [home / "projects"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("projects", "must be absolute, or begin with ~"),
        ("/", "holds a whole home"),
        ("{home}/..", "holds a whole home"),
        ("~", "is or holds a whole home, with keys in it"),
        ("{home}/self", "is or holds a whole home"),
        ("/run", "lies in /run, which sandboxes never show"),
        ("/var/run", "run, which sandboxes never show"),
        ("/proc/1/root", "lies in /proc, which sandboxes never show"),
        ("~/nothing/near", "does not exist"),
    ],
)
@pytest.mark.parametrize("key", ["visible", "writable"])
def test_what_may_not_be_shown_is_refused_in_one_line(home: Path, key: str, text: str, expected: str):
    (home / "self").symlink_to(".")
    with pytest.raises(ConfigError) as caught:
        workspace(**{key: [text.format(home=home)]})
    assert re.fullmatch(rf"\[rl\.workspace\] {key}: '[^']+' .*", str(caught.value)), caught.value
    assert expected.format(home=home) in str(caught.value)
