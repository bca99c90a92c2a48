"""Answers that OpenHands' controller takes in forks of a replayed workspace: what is one action."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from needs import needs_bubblewrap
from scripted_model import ScriptedModel, call, says, serve

from openhands_rl_plugin.config.rl import RLSettings, ServingSettings, WorkspaceSettings
from openhands_rl_plugin.config.workspace import PromptName
from openhands_rl_plugin.core.messages import to_message
from openhands_rl_plugin.core.types import EpisodeRequest, StopReason, Task
from openhands_rl_plugin.hosts.shared.options import HostOptions
from openhands_rl_plugin.hosts.v0.driver import ControllerRunner
from openhands_rl_plugin.rollout.alternatives import outcomes
from openhands_rl_plugin.training.loop.decisions import decisions_of

pytestmark = needs_bubblewrap

TASK = Task(id="t", environment="workspace", instruction="Write it.")
REQUEST = EpisodeRequest(task=TASK, run_id="r", group_id="g", seed=11)
COMMANDS = ("echo first > answer.txt", "cat answer.txt")
MORE = "echo more >> answer.txt"
TRIED = (MORE, f"{MORE}; true", "echo other > answer.txt", "true", "cat answer.txt")
"""The first two leave the same file and say the same; the fourth says the same and leaves another."""


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedModel]:
    with serve() as model:
        yield model


def answer(native: bool, name: str, arguments: dict[str, str], identity: str) -> dict[str, Any]:
    if native:
        return says(None, call(name, arguments, identity))
    lines = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in arguments.items())
    return says(f"I go on.\n<function={name}>\n{lines}</function>")


def worker(native: bool) -> Any:
    def policy(body: dict[str, Any]) -> dict[str, Any]:
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        if turn < len(COMMANDS):
            name, arguments = "execute_bash", {"command": COMMANDS[turn], "security_risk": "LOW"}
        else:
            name, arguments = "finish", {"message": "done"}
        return answer(native, name, arguments, f"call{turn}-{body['seed']}")

    return policy


@pytest.mark.parametrize(
    ("native", "prompt"),
    [(True, "standard"), (False, "standard"), (False, "compact")],
    ids=["native tool calls", "calls in the text", "compact"],
)
async def test_commands_are_compared_by_what_they_leave(
    server: ScriptedModel, native: bool, prompt: PromptName
) -> None:
    server.policies["worker"] = worker(native)
    settings = RLSettings(
        serving=ServingSettings(base_url=server.url, model="worker", request_timeout=20.0),
        workspace=WorkspaceSettings(prompt=prompt),
        max_turns=6,
        max_obs_length=4096,
    )
    runner = ControllerRunner(settings, HostOptions(environment_mode=False, native_tool_calling=native))
    try:
        source = await runner.run(REQUEST)
        assert source.stop is StopReason.TERMINATED
        decision = decisions_of([(source, 1.0, True)])[1]
        said = [
            to_message(answer(native, "execute_bash", {"command": each, "security_risk": "LOW"}, each))
            for each in TRIED
        ]
        said.append(to_message(answer(native, "finish", {"message": "early"}, "end")))
        asked = REQUEST.model_copy(
            update={"prefix": decision.path, "group_id": "tried", "candidates": tuple(map(decision.other, said))}
        )
        tried = await runner.run(asked)
        assert tried.failure is None and tried.stop is StopReason.TERMINATED
        found = list(outcomes(tried))
        assert [message for message, *_ in found] == said
        names = [outcome for _, outcome, _ in found]
        assert names[0] == names[1] and len(set(names)) == len(names) - 1
        assert [ended for *_, ended in found] == [False] * len(TRIED) + [True]
        assert "+more" in str(tried.evidence["git_patch"]) and "+other" not in str(tried.evidence["git_patch"])
    finally:
        await runner.close()
