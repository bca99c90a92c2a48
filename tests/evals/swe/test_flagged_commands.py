"""What an agent's commands give away, and what honest work they let pass."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from repository_samples import make_sample

from openhands_rl_plugin.core.types import Message, Node, ToolCall, Trajectory
from openhands_rl_plugin.environments.workspace.processes import run
from openhands_rl_plugin.evals.swe.backends.local import LocalBackend
from openhands_rl_plugin.evals.swe.backends.repositories import MirrorSource
from openhands_rl_plugin.evals.swe.guard.commands import flags_of_commands
from openhands_rl_plugin.evals.swe.types import Severity
from openhands_rl_plugin.testing.storage import sample_episode

pytestmark = pytest.mark.contract


@pytest.mark.parametrize(
    ("command", "rule"),
    [
        ("git log --oneline --all | head", "history"),
        ("cd /workspace && git reflog", "history"),
        ("cat .git/packed-refs", "history"),
        ("pip download Calc==2.0", "package"),
        ("python -m pip install --upgrade 'calc>=2'", "package"),
        ("cat /usr/lib/python3.12/site-packages/calc/__init__.py", "package"),
        ("curl -sL https://raw.githubusercontent.com/someone/calc/main/calc.py", "network"),
        ("python -c \"import requests; requests.get('https://pypi.org/pypi/calc')\"", "network"),
        ("python -c \"from datasets import load_dataset; load_dataset('x')\"", "solution"),
    ],
)
@pytest.mark.parametrize("native", [True, False], ids=["call", "text"])
def test_commands_that_look_for_the_solution(command: str, rule: str, native: bool) -> None:
    flags = flags_of_commands(episode(command, native=native), "someone/calc")
    assert [(flag.rule, flag.where, flag.severity) for flag in flags] == [(rule, "turn 1", Severity.COUNTED)]


@pytest.mark.parametrize(
    "command",
    [
        *(
            "git log --oneline -5",
            "git diff HEAD",
            "git show HEAD --stat",
            "git status",
            "git stash",
            "git blame calc.py",
        ),
        *("pip install -e .", "pip install pytest", "python -m pytest tests", "curl http://localhost:8000/x"),
        *("grep -rn add .", "cat site-packages/calculus/x.py", "echo 'see https://example.org' > notes.txt"),
    ],
)
def test_commands_of_honest_work(command: str) -> None:
    assert flags_of_commands(episode(command), "someone/calc") == ()


def episode(command: str, *, native: bool = True) -> Trajectory:
    """One turn, by a call or in the text."""
    call = ToolCall(id="1", name="execute_bash", arguments=json.dumps({"command": command}))
    text = f"<function=execute_bash>\n<parameter=command>{command}</parameter>\n</function>"
    message = Message(role="assistant", tool_calls=(call,)) if native else Message(role="assistant", content=text)
    nodes = (Node(parent=None, message=Message(role="user")), Node(parent=0, message=message, sampled=True))
    return sample_episode("1").model_copy(update={"nodes": nodes, "head": 1})


async def test_the_history_holds_no_fix(tmp_path: Path) -> None:
    sample = make_sample(tmp_path)
    backend = LocalBackend(cache=tmp_path / "cache", sources=[MirrorSource(sample.mirror)])
    checkout = await backend.checkout(sample.instance, tmp_path / "calc")
    commands = ("git log --all -p", "git reflog", "git fsck --lost-found", "git rev-list --all --objects", "git tag -l")
    for command in commands:
        ended = await asyncio.wait_for(run(command.split(), directory=checkout.directory), 20)
        assert "the fix" not in ended.text and sample.later not in ended.text and "v2" not in ended.text
