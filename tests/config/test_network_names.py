"""``[rl.workspace] network``: names of lists and hosts, and the package index that this machine's settings name."""

from __future__ import annotations

from pathlib import Path

import pytest

from openhands_rl_plugin.config.toml import settings_from_sections
from openhands_rl_plugin.config.workspace import LISTS, hosts_of, index_addresses
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.environments.workspace.network.allowed import AllowedNetwork
from openhands_rl_plugin.hosts.local import local_runner
from openhands_rl_plugin.hosts.shared.options import HostOptions
from openhands_rl_plugin.hosts.shared.sandboxed_workspace import network_of

TOKEN = "tok-5b81e0c9d2"


def workspace(**keys: object):
    return settings_from_sections({"rl": {"workspace": keys}}).workspace


def test_names_of_lists_and_hosts():
    settings = workspace(network=["pypi", "*.Example.com", "files.example.com:8443"])
    assert hosts_of(settings.network) == (*LISTS["pypi"], "*.example.com", "files.example.com:8443")
    assert workspace().network == () and network_of(workspace()) is False


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pipy", r"unknown list 'pipy'; did you mean 'pypi'\? available: crates, github, npm, pypi; hosts have a dot"),
        ("", "unknown list ''"),
        ("localhost", "unknown list 'localhost'"),
        *((name, "is no name of a host") for name in ("127.0.0.1", "10.0.0.1:80", "127.1", "0x7f.0x1", "[::1]:80")),
        *((name, "is no name of a host") for name in ("*", "*.com", "a.*.example.com", "localhost:80", "a b.c")),
        *((name, "is no name of a host") for name in ("https://example.com", "example.com:0", "example.com:65536")),
    ],
)
def test_a_wrong_name_is_one_line(name: str, said: str):
    with pytest.raises(ConfigError, match=rf"^\[rl\.workspace\] network: .*{said}[^\n]*$"):
        workspace(network=[name])


def test_all_of_the_network_and_some_hosts_contradict_each_other():
    with pytest.raises(ConfigError, match="leaves commands the whole network"):
        workspace(isolation="none", network=["pypi"])
    with pytest.raises(ConfigError, match="use_host_network"):
        network_of(workspace(network=["pypi"]), whole=True)


def test_the_index_of_pip_and_uv_is_allowed_and_its_logins_stay_outside(tmp_path: Path):
    for name, text in {
        ".config/pip/pip.conf": f"[global]\nindex-url = https://me:{TOKEN}@Index.example/simple\n"
        f"extra-index-url =\n  http://me:{TOKEN}@more.example:8080/simple?key={TOKEN}\n  file:///srv/packages\n",
        ".config/uv/uv.toml": f'[[index]]\nurl = "https://{TOKEN}@uv.example/simple"\ndefault = true\n',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    environ = {"HOME": str(tmp_path), "UV_INDEX": f"own=https://u:{TOKEN}@own.example/simple"}
    found = network_of(workspace(network=["pypi"]), environ=environ)
    assert isinstance(found, AllowedNetwork)
    assert found.index == ("index.example:443", "more.example:8080", "uv.example:443", "own.example:443")
    assert found.variables == {
        "PIP_INDEX_URL": "https://index.example/simple",
        "PIP_EXTRA_INDEX_URL": "http://more.example:8080/simple",
        "UV_DEFAULT_INDEX": "https://uv.example/simple",
        "UV_INDEX": "https://own.example/simple",
        "PIP_TRUSTED_HOST": "more.example:8080",
    }
    assert TOKEN not in found.model_dump_json()
    # Whoever does not ask for the list gets neither.
    other = network_of(workspace(network=["npm"]), environ=environ)
    assert isinstance(other, AllowedNetwork) and (other.index, other.variables) == ((), {})


def test_the_last_setting_counts_and_one_tool_stands_for_the_other(tmp_path: Path):
    (tmp_path / "pip.conf").write_text("[global]\nindex_url = http://a.example/simple\n")
    environ = {"HOME": str(tmp_path), "PIP_CONFIG_FILE": str(tmp_path / "pip.conf")}
    assert index_addresses(environ).variables["UV_DEFAULT_INDEX"] == "http://a.example/simple"
    assert index_addresses({**environ, "PIP_INDEX_URL": "http://b.example/simple"}).targets == ("b.example:80",)


def test_damaged_settings_and_addresses_with_a_token_in_their_path_are_left_out(tmp_path: Path):
    key = "ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8"
    (tmp_path / "pip.conf").write_text("no section\n")
    environ = {"HOME": str(tmp_path), "PIP_CONFIG_FILE": str(tmp_path / "pip.conf")}
    environ |= {"PIP_INDEX_URL": f"https://index.example/{key}/simple", "UV_INDEX": "https://[bad/simple"}
    found = index_addresses(environ)
    assert key not in str(found) and found.targets == ()


@pytest.mark.parametrize("name", ["HTTPS_PROXY", "https_proxy", "all_proxy"])
def test_behind_a_proxy_of_the_host_a_list_of_hosts_is_refused_without_its_password(name: str):
    environ = {name: f"http://user:{TOKEN}@proxy.example.com:3128"}
    with pytest.raises(ConfigError, match=f"proxy of {name} is not used") as refused:
        network_of(workspace(network=["pypi"]), environ=environ)
    assert TOKEN not in str(refused.value) and "\n" not in str(refused.value)
    assert network_of(workspace(), environ=environ) is False


@pytest.mark.parametrize("setting", ["network", "visible", "writable"])
def test_no_isolation_in_code_leaves_no_setting_of_the_workspace_unheeded(setting: str, tmp_path: Path):
    value = "pypi" if setting == "network" else str(tmp_path)
    settings = settings_from_sections({"rl": {"workspace": {setting: [value]}}})
    with pytest.raises(ConfigError, match=rf"\[rl.workspace\] {setting}: HostOptions\(isolation"):
        local_runner(settings, HostOptions(environment_mode=False, isolation="none"))
