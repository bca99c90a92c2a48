"""What the settings say of the network holds for a session's workspace and its forks."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from needs import needs_bubblewrap

from openhands_rl_plugin.config.toml import settings_from_sections
from openhands_rl_plugin.hosts.shared.sandboxed_workspace import SandboxedWorkspace


@needs_bubblewrap
@pytest.mark.parametrize("network", [False, True])
def test_commands_reach_the_network_of_the_host_only_where_it_is_on(network: bool, tmp_path: Path):
    settings = settings_from_sections({"rl": {"workspace": {"network": network}}}).workspace
    workspace = SandboxedWorkspace(tmp_path, settings)
    fork = workspace.fork()
    with socket.create_server(("127.0.0.1", 0)) as server:
        for each in (workspace, fork):
            reached = each.run(f"exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]}", timeout=20).exit_code == 0
            assert reached is network
    fork.close()
    workspace.close()
