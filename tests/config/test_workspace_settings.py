"""``[rl.workspace]``: which of the host's paths may be shown, and how a wrong one is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
    assert workspace(visible=["~/projects"]).visible_paths == (home / "projects",)
    assert workspace(writable=["~/link"]).writable_paths == (home / "projects",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("projects", "must be absolute, or begin with ~"),
        ("/", "holds whole homes"),
        ("{home}/..", "holds whole homes"),
        ("~", "is a whole home, with keys in it; name folders in it, or add whole_home = true"),
        ("{home}/self", "is a whole home"),
        ("/run", "lies in /run, which sandboxes never show"),
        ("/var/run", "run, which sandboxes never show"),
        ("/proc/1/root", "lies in /proc, which sandboxes never show"),
        ("~/nothing/near", "does not exist"),
    ],
)
@pytest.mark.parametrize("key", ["visible", "writable"])
def test_what_may_not_be_shown_is_refused_in_one_line(home: Path, key: str, text: str, said: str):
    (home / "self").symlink_to(".")
    with pytest.raises(ConfigError) as caught:
        workspace(**{key: [text.format(home=home)]})
    assert re.fullmatch(rf"\[rl\.workspace\] {key}: '[^']+' .*", str(caught.value)), caught.value
    assert said.format(home=home) in str(caught.value)


def test_a_whole_home_is_shown_where_that_is_said(home: Path):
    assert workspace(visible=["~"], whole_home=True).visible_paths == (home,)


def test_a_key_that_does_not_exist_names_the_nearest():
    with pytest.raises(ConfigError, match=r"\[rl\.workspace\] visable: unknown key; did you mean 'visible'\?"):
        workspace(visable=["/data"])


def test_the_network_is_off_or_on_and_no_list():
    assert workspace().network is False and workspace(network=True, isolation="none").network is True
    with pytest.raises(ConfigError, match=r"^\[rl\.workspace\] network: must be a valid boolean"):
        workspace(network=["pypi", "*.example.com"])
