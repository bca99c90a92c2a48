"""``RLAgent`` in OpenHands' real controller, playing bound episodes in one process: limits, versions, candidates."""

from __future__ import annotations

import tomllib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from scripted_model import ScriptedModel, call, refusal, says, serve, with_prompt_ids

from openhands_rl_plugin.config.rl import RLSettings, ServingSettings
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.core.protocols import Forkable, LLMEngine
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    EpisodeRequest,
    FailureKind,
    Limits,
    Message,
    SamplingParams,
    StopReason,
    Task,
    Trajectory,
)
from openhands_rl_plugin.hosts.pool import WorkerPoolRunner
from openhands_rl_plugin.hosts.shared.sessions import HostOptions
from openhands_rl_plugin.hosts.v0.agent import WORKSPACE_RUNTIME
from openhands_rl_plugin.hosts.v0.controller_session import ControllerRunner
from openhands_rl_plugin.rollout.strategies.base import StandardReActStrategy

pytestmark = pytest.mark.contract

TASK = Task(id="t", environment="workspace", instruction="Think.")
FINISH = says(None, call("finish", {"message": "done"}))
THINK = says(None, call("think", {"thought": "hm"}))


class FirstThatParses(StandardReActStrategy):
    """Takes the first of three candidates that OpenHands can read, and asks itself about them in between."""

    async def decide(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable | None) -> int:
        answers = await engine.complete(tree.messages(), tools=tree.tools, n=3)
        nodes = [tree.propose(answer) for answer in answers]
        await engine.complete([*tree.messages(), Message(role="user", content="Which is best?")])
        await engine.complete([Message(role="user", content="Judge.")], sampling=SamplingParams(temperature=0.0))
        return next(node for node in nodes if "malformed" not in tree.nodes[node].metadata)


class FirstOfThree(StandardReActStrategy):
    """Takes the first of as many of three candidates as it gets."""

    async def decide(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable | None) -> int:
        nodes = [tree.propose(answer) for answer in await engine.complete(tree.messages(), n=3)]
        return nodes[0]


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedModel]:
    with serve() as model:
        yield model


async def play(
    server: ScriptedModel, model: str, *, strategy: str = "StandardReAct", settings: dict | None = None, **request
) -> Trajectory:
    own = RLSettings(
        serving=ServingSettings(base_url=server.url, model=model, request_timeout=20.0),
        rollout_strategy=strategy,
        **(settings or {}),
    )
    runner = ControllerRunner(own, HostOptions(environment_mode=False))
    limits = request.pop("limits", None)
    task = TASK.model_copy(update={"limits": limits})
    try:
        return await runner.run(EpisodeRequest(task=task, run_id="r", group_id="g", **request))
    finally:
        await runner.close()


@pytest.fixture
async def finished(server) -> AsyncIterator[ScriptedModel]:
    yield server
    for model, script in server.scripts.items():
        assert not script, f"{model} was asked less often than expected"


@pytest.mark.shows("BestOfN")
async def test_candidates_are_sampled_side_by_side_and_a_broken_one_is_passed_over(finished):
    broken = says(None, call("execute_bash", '{"command": 5}'))
    finished.script("many", [broken, broken, THINK, says("The last."), says("1"), *[THINK] * 3, says("x"), says("y")])
    finished.delay, finished.most_at_once = 0.2, 0
    trajectory = await play(
        finished,
        "many",
        strategy="test_agent_episodes:FirstThatParses",
        limits=Limits(max_turns=2, max_response_length=77),
        seed=5,
    )
    finished.delay = 0.0
    assert finished.most_at_once == 3
    assert trajectory.stop is StopReason.MAX_TURNS
    candidates = [node for node in trajectory.nodes if node.sampled]
    assert len(candidates) == 6
    malformed = [node.metadata.get("malformed") for node in candidates[:3]]
    assert sorted(error is None for error in malformed) == [False, False, True]
    assert "'command' must be text, got 5" in str(next(filter(None, malformed)))
    requests = finished.requests["many"]
    assert {request["max_completion_tokens"] for request in requests} == {77}
    assert len({request["seed"] for request in requests}) == len(requests)
    asked, judged = requests[3], requests[4]
    assert asked["messages"][:-1] == requests[0]["messages"] and asked["messages"][-1]["content"] == "Which is best?"
    assert judged["messages"] == [{"role": "user", "content": "Judge."}] and "tools" not in judged
    assert judged["temperature"] == 0.0 and requests[0]["temperature"] == 1.0


async def test_candidates_that_were_answered_are_kept_when_another_one_fails(finished):
    seeds: list[int] = []

    def lucky(body):
        seeds.extend({body["seed"]} - {*seeds})
        return refusal(422, "out of luck") if body["seed"] in seeds[1:2] else THINK

    finished.policies["lucky"] = lucky
    trajectory = await play(finished, "lucky", strategy="test_agent_episodes:FirstOfThree", limits=Limits(max_turns=1))
    assert trajectory.stop is StopReason.MAX_TURNS and trajectory.failure is None
    assert sum(node.sampled for node in trajectory.nodes) == trajectory.usage.calls == 2
    assert "out of luck" in str([node.metadata.get("failed_attempts") for node in trajectory.nodes])
    finished.script("unlucky", [refusal(422, "out of luck")] * 6)
    trajectory = await play(finished, "unlucky", strategy="test_agent_episodes:FirstOfThree")
    assert trajectory.failure is not None and trajectory.failure.kind is FailureKind.MODEL
    assert "out of luck" in trajectory.failure.message


async def test_the_served_adapter_is_asked_for_and_recorded(finished):
    finished.script("shop-v000007", [FINISH])
    trajectory = await play(
        finished, "base", served_model="shop-v000007", sampling=SamplingParams(temperature=0.0, top_p=0.5), seed=3
    )
    (request,) = finished.requests["shop-v000007"]
    assert (request["temperature"], request["top_p"], request["seed"]) == (0.0, 0.5, 3)
    assert trajectory.policy.model_dump() == {"base_model": "base", "adapter": "shop", "version": 7}
    sampled = next(node for node in trajectory.nodes if node.sampled)
    assert sampled.policy == trajectory.policy
    assert sampled.sampling is not None and sampled.sampling.temperature == 0.0
    assert trajectory.stop is StopReason.TERMINATED


async def test_it_finishes_before_the_prompt_grows_too_long(finished):
    finished.script("long", [THINK])
    trajectory = await play(finished, "long", settings={"max_prompt_length": 2000})
    assert trajectory.stop is StopReason.MAX_TOKENS, "already the first prompt is longer"
    assert not any(node.sampled for node in trajectory.nodes)
    finished.scripts["long"].clear()


async def test_the_default_prompt_length_does_not_bind_a_workspace(finished):
    finished.script("free", [THINK, FINISH])
    assert (await play(finished, "free")).stop is StopReason.TERMINATED


async def test_a_copied_example_plays_in_the_runtime_that_it_names(finished, tmp_path: Path):
    finished.script("copied", [THINK, FINISH])
    example = (Path(__file__).parents[3] / "config.toml.example").read_text()
    (tmp_path / "config.toml").write_text(example)
    serving = ServingSettings(base_url=finished.url, model="copied", request_timeout=20.0)
    settings = load_settings(tmp_path / "config.toml").model_copy(update={"serving": serving})
    options = HostOptions(environment_mode=False)
    assert tomllib.loads(example)["core"]["runtime"] == WORKSPACE_RUNTIME
    runner = ControllerRunner(settings, options)
    try:
        trajectory = await runner.run(EpisodeRequest(task=TASK, run_id="r", group_id="g"))
    finally:
        await runner.close()
    assert trajectory.stop is StopReason.TERMINATED and trajectory.failure is None


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_the_default_does_not_bind_a_workspace_in_a_worker_process_which_is_sent_all_settings(finished):
    finished.script("pooled", [THINK, FINISH])
    own = RLSettings(serving=ServingSettings(base_url=finished.url, model="pooled", request_timeout=20.0))
    pool = WorkerPoolRunner(own, HostOptions(environment_mode=False), workers=1)
    try:
        trajectory = await pool.run(EpisodeRequest(task=TASK, run_id="r", group_id="g"))
    finally:
        await pool.close()
    assert trajectory.stop is StopReason.TERMINATED and trajectory.failure is None


async def test_a_full_context_window_ends_the_episode_as_a_limit_does(finished):
    message = "This model's maximum context length is 100 tokens. Please reduce the length of the messages."
    # It comes twice: the request is sent again without what the server may refuse.
    finished.script("full", [THINK, refusal(400, message), refusal(400, message)])
    trajectory = await play(finished, "full")
    assert trajectory.stop is StopReason.MAX_TOKENS and trajectory.failure is None
    assert "maximum context length" in str(trajectory.nodes[trajectory.head or 0].metadata["failed_attempts"])


async def test_a_refusal_is_the_models_failure(finished):
    finished.script("strict", [refusal(422, "unknown parameter")])
    trajectory = await play(finished, "strict")
    assert trajectory.failure is not None and trajectory.failure.kind is FailureKind.MODEL


@pytest.mark.parametrize("ids", [["1", "2"], [1.5, 2], [-1]])
async def test_an_answer_whose_token_ids_are_no_whole_numbers_is_recorded_without_any(finished, ids):
    finished.script("odd", [with_prompt_ids(THINK, ids), THINK])
    trajectory = await play(finished, "odd", limits=Limits(max_turns=2))
    assert trajectory.failure is None
    assert [node.tokens is not None for node in trajectory.sampled()] == [False, True]
    assert Trajectory.model_validate_json(trajectory.model_dump_json()) == trajectory


@pytest.mark.parametrize(
    "arguments",
    ["[]", "5", "null", '"ls"', '{"command": null}', '{"command": ["ls"]}', "{", '{"command": "ls", "timeout": [1]}'],
)
async def test_arguments_of_any_kind_are_answered_and_cost_a_turn(finished, arguments):
    finished.script("clumsy", [says("Hm.", call("execute_bash", arguments))] * 2)
    trajectory = await play(finished, "clumsy", limits=Limits(max_turns=2))
    assert trajectory.stop is StopReason.MAX_TURNS and trajectory.failure is None
    assert [node.message.role for node in trajectory.nodes if not node.sampled][-2:] == ["user", "user"]
    assert all("malformed" in node.metadata for node in trajectory.nodes if node.sampled)
