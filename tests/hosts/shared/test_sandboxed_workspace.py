"""What the settings say of the network holds for a session's workspace and its forks."""

from __future__ import annotations

import threading
from pathlib import Path

from needs import needs_bubblewrap

from openhands_rl_plugin.config.toml import settings_from_sections
from openhands_rl_plugin.hosts.shared.sandboxed_workspace import SandboxedWorkspace

ASK = "import urllib.request; urllib.request.urlopen('http://other.example')"


@needs_bubblewrap
def test_the_hosts_of_the_settings_are_reached_by_a_proxy_and_no_others(tmp_path: Path):
    settings = settings_from_sections({"rl": {"workspace": {"network": ["*.example.com"]}}}).workspace
    workspace = SandboxedWorkspace(tmp_path, settings)
    fork = workspace.fork(threading.Event())
    for each in (workspace, fork):
        said = each.run(f'echo $https_proxy; python3 -c "{ASK}"', timeout=20).output
        assert said.startswith("http://127.0.0.1:3128\n") and said.endswith("HTTP Error 403: Refused\n")
    fork.close()
    workspace.close()
