"""Answers that the controller takes in forks of a replayed workspace: what is one action, and what it is worth."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from needs import needs_bubblewrap
from scripted_model import ScriptedModel, call, says, serve
from shopping_loop import make_plan

from openhands_rl_plugin.config.rl import RLSettings, ServingSettings, WorkspaceSettings
from openhands_rl_plugin.config.workspace import PromptName
from openhands_rl_plugin.core.messages import to_message
from openhands_rl_plugin.core.types import EpisodeRequest, Message, Score, StopReason, Task, Trajectory
from openhands_rl_plugin.hosts.shared.options import HostOptions
from openhands_rl_plugin.hosts.v0.driver import ControllerRunner
from openhands_rl_plugin.models.engines.served import ServedEngines
from openhands_rl_plugin.rewards.outcome import ReturnReward
from openhands_rl_plugin.rollout.alternatives import outcomes
from openhands_rl_plugin.rollout.many import RolloutPlan, roll_out
from openhands_rl_plugin.rollout.rescoring import rescore
from openhands_rl_plugin.training.loop.decisions import SingleAnswers, decisions_of
from openhands_rl_plugin.training.loop.pivots import Pivots
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

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


def settings_of(server: ScriptedModel, model: str, prompt: PromptName) -> RLSettings:
    return RLSettings(
        serving=ServingSettings(base_url=server.url, model=model, request_timeout=20.0),
        workspace=WorkspaceSettings(prompt=prompt),
        max_turns=6,
        max_obs_length=4096,
    )


@pytest.mark.parametrize(
    ("native", "prompt"),
    [
        (True, "standard"),
        pytest.param(False, "standard", marks=pytest.mark.slow),
        pytest.param(False, "compact", marks=pytest.mark.slow),
    ],
    ids=["native tool calls", "calls in the text", "compact"],
)
async def test_commands_are_compared_by_what_they_leave(
    server: ScriptedModel, native: bool, prompt: PromptName
) -> None:
    server.policies["worker"] = worker(native)
    settings = settings_of(server, "worker", prompt)
    runner = ControllerRunner(settings, HostOptions(environment_mode=False, native_tool_calling=native))
    try:
        first = len(server.requests["worker"])
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
        await one_answer(server, settings, source, first, decision)
        assert "+more" in str(tried.evidence["git_patch"]) and "+other" not in str(tried.evidence["git_patch"])
    finally:
        await runner.close()


async def one_answer(
    server: ScriptedModel, settings: RLSettings, source: Trajectory, first: int, decision: Any
) -> None:
    """The model alone is asked in the very words of the session."""
    engines = ServedEngines(settings)
    request = REQUEST.model_copy(
        update={"prefix": decision.path, "group_id": "single", "sampling": decision.sampling, "seed": 3}
    )
    asked = len(server.requests["worker"])
    alone = await SingleAnswers(engines, "worker", {"single": decision}).run(request)
    await engines.close()
    assert len(server.requests["worker"]) == asked + 1
    sent, recorded = server.requests["worker"][asked], server.requests["worker"][first + 1]
    assert [wording(each) for each in sent["messages"]] == [wording(each) for each in recorded["messages"]]
    for key in ("tools", "stop", "temperature", "top_p", "model"):
        assert sent.get(key) == recorded.get(key), key
    told: Message = alone.messages()[-1]
    assert told.content == source.nodes[source.acted()[1]].message.content


def wording(wire: dict[str, Any]) -> Message:
    """What a chat template makes of it: no text is an empty one."""
    message = to_message(wire)
    return message.model_copy(update={"content": message.content or ""})


WRITES = ("echo good > answer.txt", "echo good > ./answer.txt", "echo bad > answer.txt")


class Wrote:
    """A reward of 1 for what should be in the file."""

    version = "wrote-1"

    async def __call__(self, trajectory: Trajectory) -> Score:
        good = float("+good" in str(trajectory.evidence["git_patch"]))
        return Score(trajectory_id=trajectory.id, reward=good, reward_version=self.version)


@pytest.mark.slow
@pytest.mark.parametrize(("native", "prompt"), [(True, "standard"), (False, "compact")], ids=["native", "compact"])
async def test_pivots_of_a_workspace(server: ScriptedModel, tmp_path: Path, native: bool, prompt: PromptName) -> None:
    """It looks around, writes one of two things in three wordings by chance, and ends."""

    def policy(body: dict[str, Any]) -> dict[str, Any]:
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        write = WRITES[body["seed"] % 3]
        if turn < 2:
            given = {"command": ("pwd", write)[turn], "security_risk": "LOW"}
            return answer(native, "execute_bash", given, f"call{turn}-{body['seed']}")
        return answer(native, "finish", {"message": "done"}, f"call{turn}-{body['seed']}")

    server.policies["writer"] = policy
    settings = settings_of(server, "writer", prompt)
    runner = ControllerRunner(settings, HostOptions(environment_mode=False, native_tool_calling=native))
    storage, engines = FileTrajectoryStorage(tmp_path), ServedEngines(settings)
    parts: Any = SimpleNamespace(
        runner=runner, storage=storage, engine=engines, reward=ReturnReward(), objective=Wrote()
    )
    plan = make_plan("written", base_model="writer", pivots=2, samples_per_task=6, concurrency=2)
    try:
        run_id = f"{plan.run_id}/iteration-000"
        await roll_out(RolloutPlan(run_id=run_id, tasks=(TASK,), samples_per_task=2), runner, storage)
        await rescore(storage, parts.objective)
        groups = await Pivots(plan, parts).groups(0, 0, "writer", lambda *_: None)
        counts = groups.metrics
        assert counts["pivots"] == 1 and counts["answers_failed"] == counts["answers_unvalued"] == 0
        said = [str(each.messages()[-1]) for each in groups.answers]
        assert groups.values == tuple(float("good" in each) for each in said) and set(groups.values) == {0.0, 1.0}
        assert (counts["wordings"], counts["outcomes"]) == (len({*map(words, said)}), 2)
        before = len(server.requests["writer"])
        again = await Pivots(plan, parts).groups(0, 1, "writer", lambda *_: None)
        known = again.metrics["answers_tried"] == 0
        assert len(server.requests["writer"]) - before == 6 or not known, "the model alone is asked"
    finally:
        await runner.close()
        await engines.close()
        await storage.close()


def words(said: str) -> str:
    return next(each for each in WRITES if each in said)
