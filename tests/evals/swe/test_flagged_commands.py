"""What an agent's commands give away, and what honest work they let pass."""

from __future__ import annotations

import json

import pytest

from openhands_rl_plugin.core.types import Message, Node, ToolCall, Trajectory
from openhands_rl_plugin.evals.swe.guard.commands import flags_of_commands
from openhands_rl_plugin.evals.swe.types import Severity
from openhands_rl_plugin.testing.storage import sample_episode

pytestmark = pytest.mark.contract


@pytest.mark.parametrize(
    ("command", "rule"),
    [
        ("git log --oneline --all | head", "history"),
        ("cat .git/packed-refs", "history"),
        ("python -m pip install --upgrade 'calc>=2'", "package"),
        ("cat /usr/lib/python3.12/site-packages/calc/__init__.py", "package"),
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
        *("git log --oneline -5", "git show HEAD --stat", "git stash", "git blame calc.py"),
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
