"""An environment with OpenHands V1: V0's line in it is silent, ``doctor`` knows the host, the SDK finds the agent."""

from __future__ import annotations

import json
import subprocess
import sys

from openhands_rl_plugin.cli.doctor import Level, check_installation
from openhands_rl_plugin.config.host import installed_hosts

LOADED = """
import json, sys
import openhands.sdk.logger
print(json.dumps([name for name in sys.modules if name.startswith("openhands_rl_plugin")]))
"""


def test_the_line_that_waits_for_v0_is_silent_and_loads_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=120, check=True)
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert {name.removeprefix("openhands_rl_plugin") for name in loaded} <= {
        *("", ".hosts", ".hosts.v0", ".hosts.v0.autoload")
    }
    assert "openhands_rl_plugin" not in done.stderr and "Traceback" not in done.stderr


def test_doctor_names_the_host_and_finds_the_agent() -> None:
    assert installed_hosts() == ("v1",)
    findings = {finding.what: finding for finding in check_installation()}
    assert findings["host"].level is Level.OK and "OpenHands V1: openhands-sdk" in findings["host"].found
    assert findings["registration"].level is Level.OK, findings["registration"].found
    assert findings["registration"].found == "RLAgent registered as openhands_rl_plugin.hosts.v1.agent"
