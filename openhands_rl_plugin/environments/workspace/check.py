"""A command over a workspace as its session left it: the project's tests, say, in a fresh sandbox."""

from __future__ import annotations

import time
from collections.abc import Mapping

from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.core.records import CommandEvidence, WorkspaceCommand
from openhands_rl_plugin.environments.workspace.sandbox import Sandbox, SandboxLimits
from openhands_rl_plugin.environments.workspace.shell import SandboxEndedError, Shell

MOST_OUTPUT = 16_000
_START = 20.0


def check_workspace(
    asked: WorkspaceCommand,
    sandbox: Sandbox,
    variables: Mapping[str, str],
    limits: SandboxLimits,
    *,
    start: str | None = None,
) -> CommandEvidence:
    """Run the command in a shell of its own: no alias, variable or file in ``/tmp`` of the session has a say. Blocks.

    ``start``: where it begins, as the session sees it (default: the workspace). Its output is cut to 16,000 bytes.
    """
    limits = limits.model_copy(update={"output": MOST_OUTPUT})
    # Its time limit is part of what it measures.
    shell = Shell(sandbox, variables, limits, start=start, gives_way=False)
    began = 0.0
    try:
        shell.run(":", timeout=_START)
        began = time.monotonic()
        result = shell.run(asked.command, timeout=asked.timeout)
        did = {"exit_code": result.exit_code, "timed_out": result.timed_out, "output": result.output}
    except InfrastructureError as error:
        # Who ends a sandbox that worked is the command, with the code that it runs.
        did = {"prevented" if began and isinstance(error, SandboxEndedError) else "error": str(error)}
    finally:
        shell.close()
    return asked.did(**did, seconds=round(time.monotonic() - began, 3) if began else 0.0)
