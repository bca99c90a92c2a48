"""``RLAgent``, and OpenHands' own agents, in the real controller: limits, candidates, rewards, condensed histories."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest
from controller_play import FINISH, bash, play, settings_for, stored
from needs import needs_bubblewrap
from openhands.core.config import OpenHandsConfig
from openhands.core.config.extended_config import ExtendedConfig
from openhands.core.main import run_controller
from openhands.core.setup import create_agent
from openhands.events.action import MessageAction
from openhands.llm.llm_registry import LLMRegistry
from scripted_model import ScriptedModel, call, refusal, reply

from openhands_rl_plugin.apps.rl_agent import RLAgent
from openhands_rl_plugin.config.build import make_reward
from openhands_rl_plugin.config.rl import RewardSettings, RLSettings, TrainingSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import Forkable, LLMEngine
from openhands_rl_plugin.core.records import LAST_ERROR, WorkspaceCommand
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    CONDENSATION,
    TURN,
    Failure,
    FailureKind,
    JsonObject,
    Limits,
    Message,
    Sample,
    SamplingParams,
    StopReason,
    Trajectory,
    kind_of,
)
from openhands_rl_plugin.environments.workspace.sandbox import BubblewrapSandbox, SandboxLimits, SubprocessSandbox
from openhands_rl_plugin.environments.workspace.shell import MOST_OUTPUT, check_workspace
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace, WorkspaceMount
from openhands_rl_plugin.hosts.shared.sessions import HostOptions
from openhands_rl_plugin.hosts.v0.controller_session import controller_config
from openhands_rl_plugin.rollout.scoring import judge
from openhands_rl_plugin.rollout.strategies.base import StandardReActStrategy
from openhands_rl_plugin.training.algorithms import off_policy_sampling, samples_of
from openhands_rl_plugin.training.data.dataset import Episodes, is_failed
from openhands_rl_plugin.training.learn import build_dataset

pytestmark = pytest.mark.contract

THINK = reply(None, call("think", {"thought": "hm"}))


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


@pytest.mark.shows("BestOfN")
async def test_candidates_are_sampled_side_by_side_and_a_broken_one_is_passed_over(server: ScriptedModel):
    broken = reply(None, call("execute_bash", '{"command": 5}'))
    server.script("many", [broken, broken, THINK, reply("The last."), reply("1"), *[THINK] * 3, reply("x"), reply("y")])
    server.delay, server.most_at_once = 0.2, 0
    limits, strategy = Limits(max_turns=2, max_response_length=77), "test_agent_episodes:FirstThatParses"
    trajectory = await play(server, "many", limits=limits, rollout_strategy=strategy)
    server.delay = 0.0
    assert server.most_at_once == 3 and not server.scripts["many"]
    assert trajectory.stop is StopReason.MAX_TURNS
    candidates = [node for node in trajectory.nodes if node.sampled]
    assert len(candidates) == 6
    malformed = [node.metadata.get("malformed") for node in candidates[:3]]
    assert sorted(error is None for error in malformed) == [False, False, True]
    assert "'command' must be text, got 5" in str(next(filter(None, malformed)))
    requests = server.requests["many"]
    assert {request["max_completion_tokens"] for request in requests} == {77}
    assert len({request["seed"] for request in requests}) == len(requests)
    asked, judged = requests[3], requests[4]
    assert asked["messages"][:-1] == requests[0]["messages"] and asked["messages"][-1]["content"] == "Which is best?"
    assert judged["messages"] == [{"role": "user", "content": "Judge."}] and "tools" not in judged
    assert judged["temperature"] == 0.0 and requests[0]["temperature"] == 1.0


async def test_candidates_that_were_answered_are_kept_when_another_one_fails(server: ScriptedModel):
    seeds: list[int] = []

    def lucky(body):
        seeds.extend({body["seed"]} - {*seeds})
        return refusal(422, "out of luck") if body["seed"] in seeds[1:2] else THINK

    server.policies["lucky"] = lucky
    strategy = {"rollout_strategy": "test_agent_episodes:FirstOfThree"}
    trajectory = await play(server, "lucky", limits=Limits(max_turns=1), **strategy)
    assert trajectory.stop is StopReason.MAX_TURNS and trajectory.failure is None
    assert sum(node.sampled for node in trajectory.nodes) == trajectory.usage.calls == 2
    assert "out of luck" in str([node.metadata.get("failed_attempts") for node in trajectory.nodes])
    server.script("unlucky", [refusal(422, "out of luck")] * 6)
    trajectory = await play(server, "unlucky", **strategy)
    assert trajectory.failure is not None and trajectory.failure.kind is FailureKind.MODEL
    assert "out of luck" in trajectory.failure.message


async def test_a_prompt_that_is_too_long_ends_the_episode_as_a_limit_does(server: ScriptedModel):
    server.script("long", [THINK])
    trajectory = await play(server, "long", max_prompt_length=2000)
    assert trajectory.stop is StopReason.MAX_TOKENS, "already the first prompt is longer"
    assert not any(node.sampled for node in trajectory.nodes)
    message = "This model's maximum context length is 100 tokens. Please reduce the length of the messages."
    # It comes twice: the request is sent again without what the server may refuse.
    server.script("full", [THINK, refusal(400, message), refusal(400, message)])
    trajectory = await play(server, "full")
    assert trajectory.stop is StopReason.MAX_TOKENS and trajectory.failure is None
    assert "maximum context length" in str(trajectory.nodes[trajectory.head or 0].metadata["failed_attempts"])


@pytest.mark.parametrize(
    "arguments",
    ["[]", "5", "null", '{"command": null}', '{"command": ["ls"]}', "{", '{"command": "ls", "timeout": [1]}'],
)
async def test_arguments_of_any_kind_are_answered_and_cost_a_turn(server: ScriptedModel, arguments: str):
    server.script("clumsy", [reply("Hm.", call("execute_bash", arguments))] * 2)
    trajectory = await play(server, "clumsy", limits=Limits(max_turns=2))
    assert trajectory.stop is StopReason.MAX_TURNS and trajectory.failure is None
    assert [node.message.role for node in trajectory.nodes if not node.sampled][-2:] == ["user", "user"]
    assert all("malformed" in node.metadata for node in trajectory.nodes if node.sampled)


async def test_a_malformed_completion_is_trained_on_by_a_teacher_and_not_by_rewards(server: ScriptedModel):
    """OpenHands goes on without it, so that no reward is its own; a teacher scores it, also before a failure."""
    broken = reply("Hm.", call("execute_bash", '{"command": 5}'))
    server.script("fails", [broken, THINK, broken])
    server.script("works", [THINK, FINISH])
    server.script("refused", [broken, *[refusal(422, "no more")] * 6])
    played = [await play(server, name, limits=Limits(max_turns=3)) for name in ("fails", "works", "refused")]
    assert [each.failure and each.failure.kind for each in played] == [None, None, FailureKind.MODEL]
    malformed = [node for each in played for node in each.nodes if "malformed" in node.metadata]
    for algorithm, count in (("opd", 3), ("grpo", 0)):
        settings = TrainingSettings.model_validate({"algorithm": algorithm, "teacher": "http://teacher"})
        kept = [each.model_copy(update={"group_id": "g"}) for each in played if not is_failed(each, rewarded=not count)]
        episodes = Episodes(tuple(kept), (0.0, 1.0, None)[: len(kept)])
        samples = build_dataset(episodes, settings, regroup=False).samples
        trained = [sample.input_ids[start:stop] for sample in samples for _, start, stop in sample.spans]
        assert len(trained) == 3 + count
        assert sum(node.tokens is not None and node.tokens.sampled_ids in trained for node in malformed) == count


STOCK = {
    "agent": "CodeActAgent",
    "token_ids": False,
    "stuck_detection": True,
    "llm_retries": 1,
    "replies": ("Go on.\n", "Go on.\nOr give up.\n"),
}


def heard(trajectory: Trajectory, role: str) -> list[str]:
    return [message.content or "" for message in trajectory.messages() if message.role == role]


@pytest.mark.shows("the stock agent, recorded")
async def test_a_stock_agent_is_recorded(server: ScriptedModel):
    server.script("stock", [bash("echo one > a.txt; cat a.txt"), reply("I think so."), reply("Really."), FINISH])
    sampling = {"seed": 7, "sampling": SamplingParams(temperature=0.25)}
    record = await play(server, "stock", options=STOCK, request=sampling)
    assert (record.stop, record.failure, record.strategy.name) == (StopReason.TERMINATED, None, "CodeActAgent")
    assert [node.message.content for node in record.sampled()][1:3] == ["I think so.", "Really."]
    assert heard(record, "tool")[0].startswith("one\n")
    assert heard(record, "user")[-2:] == ["Go on.\n", "Go on.\nOr give up.\n"]
    assert "+one" in str(record.evidence["git_patch"]) and "execute_bash" in str(record.tools[0])
    asked = server.requests["stock"]
    assert {(body["temperature"], body["seed"]) for body in asked} == {(0.25, 7)}
    assert not any("logprobs" in body or "return_token_ids" in body for body in asked)
    assert record.usage.calls == len(asked) == 4


async def test_a_loop_is_ended_by_openhands_own_detector(server: ScriptedModel):
    server.script("stuck", [bash("echo again", f"call-{number}") for number in range(9)])
    record = await play(server, "stuck", options=STOCK, limits=Limits(max_turns=10))
    assert (record.stop, record.failure) == (StopReason.TRUNCATED, None)
    assert "stuck" in str(record.evidence[LAST_ERROR]).lower()


@pytest.mark.parametrize(("status", "kind"), [(400, FailureKind.MODEL), (503, FailureKind.INFRASTRUCTURE)])
async def test_whose_fault_an_error_was(server: ScriptedModel, status: int, kind: FailureKind):
    server.script(f"fails-{status}", [refusal(status, "no")] * 5)
    record = await play(server, f"fails-{status}", options=STOCK)
    assert record.failure and record.failure.kind is kind


async def test_an_agent_that_does_not_exist(server: ScriptedModel):
    with pytest.raises(ConfigError, match=r"available: .*CodeActAgent"):
        await play(server, "m", options={"agent": "CodeActAgnet"})


@needs_bubblewrap
@pytest.mark.parametrize("agent", ["CodeActAgent", "RLAgent"])
async def test_an_episode_in_a_workspace_of_its_own(server: ScriptedModel, tmp_path: Path, agent: str):
    directory, note = tmp_path / "root" / "owner__repo__1.0", tmp_path / "elsewhere" / "note.txt"
    directory.mkdir(parents=True)
    (directory / "code.py").write_text("broken\n")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "the only commit"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=directory, check=True)
    note.parent.mkdir()
    note.write_text("a note\n")
    mount = WorkspaceMount(host=note.parent, inside="/opt/notes")
    variables = {"NOTE": "/opt/notes/note.txt"}
    own = TaskWorkspace(root=tmp_path / "root", repository=directory.name, mounts=(mount,), variables=variables)
    show = f'pwd; cat "$NOTE"; git log --oneline; echo fixed > code.py; ls -d {note.parent}; ls ..'
    server.script(f"workspace-{agent}", [bash(show), FINISH])
    record = await play(server, f"workspace-{agent}", options={**STOCK, "agent": agent}, place=own)
    text = heard(record, "tool")[0]
    assert text.startswith("/workspace/owner__repo__1.0\na note\n"), text
    assert "the only commit" in text and "owner__repo__1.0" in text
    assert f"'{note.parent}': No such file" in text, "the host's own files are not shown"
    patch = str(record.evidence["git_patch"])
    assert "--- a/code.py\n+++ b/code.py" in patch and "+fixed" in patch
    assert record.evidence["changed_files"] == {"code.py": "modified"}


@pytest.mark.shows("rewards by a command")
async def test_the_rewards_command_judges_what_the_session_left(server: ScriptedModel) -> None:
    """Neither an alias, a variable nor a file outside of the workspace counts, and it is no part of the patch."""
    options = {"command": "touch by-product; grep -c right answer.txt", "result": "last-line"}
    reward = {"name": "command", "options": options}
    cheat = "echo right > answer.txt; grep() { echo 99; }; export -f grep; alias grep='echo 99'"
    server.script("right", [bash(cheat), FINISH])
    trajectory = await play(server, "right", reward=reward)
    ran = trajectory.evidence["command"]
    assert isinstance(ran, dict) and (ran["exit_code"], ran["output"]) == (0, "1\n")
    assert trajectory.evidence["changed_files"] == {"answer.txt": "added"}
    score = await judge(make_reward(RewardSettings.model_validate(reward)), trajectory)
    assert not isinstance(score, Failure) and score.reward == 1.0
    assert trajectory.known_return is None, "a workspace has no reward of its own"


@pytest.mark.parametrize("isolated", [True, False])
def test_the_rewards_command_is_bounded_in_time_and_output(isolated: bool, tmp_path: Path) -> None:
    root = tmp_path / "workspace"
    root.mkdir()
    sandbox = BubblewrapSandbox(root) if isolated else SubprocessSandbox(root, tmp_path / "private")

    def check(command: str, timeout: float = 20.0) -> JsonObject:
        asked = WorkspaceCommand(command=command, timeout=timeout)
        return check_workspace(asked, sandbox, {}, SandboxLimits()).model_dump(mode="json")

    slow: Any = check("echo begun; sleep 30", 0.5)
    assert slow["timed_out"] and slow["exit_code"] is None and slow["seconds"] < 10 and "begun" in slow["output"]
    long: Any = check("seq 1 100000; echo 0.5")
    assert len(long["output"]) < 2 * MOST_OUTPUT and long["output"].endswith("0.5\n")
    assert check("exit 3")["exit_code"] == 3


def test_where_there_is_no_workspace_the_run_does_not_begin(tmp_path: Path) -> None:
    reward = {"name": "command", "options": {"command": "pytest -q"}}
    with pytest.raises(ConfigError, match=r"`pytest -q` judges a workspace .* RLAgent runs environments"):
        RLAgent(str(tmp_path), config=RLSettings.model_validate({"reward": reward}))
    config = OpenHandsConfig(
        default_agent="RLAgent",
        runtime="openhands_rl_plugin.hosts.v0.runtime.EnvironmentRuntime",
        extended=ExtendedConfig({"rl": {"reward": reward}}),
    )
    with pytest.raises(ConfigError, match="EnvironmentRuntime' cannot run it: set runtime = "):
        create_agent(config, LLMRegistry(config))


CONDENSER = {"type": "llm", "max_size": 10, "keep_first": 3}
TURNS = 12
UNISOLATED = {"workspace": {"isolation": "none"}}


def trained(samples: list[Sample]) -> int:
    return sum(sum(sample.mask) for sample in samples)


@pytest.mark.parametrize("agent", ["RLAgent", "CodeActAgent"])
@pytest.mark.shows("condensers, summaries recorded")
async def test_all_acted_sampled_tokens_of_a_condensed_session_are_trained(server: ScriptedModel, agent: str) -> None:
    numbers = iter(range(1000))

    def policy(body: dict) -> dict:
        number = next(numbers)
        if not body.get("tools"):
            return reply(f"summary {number}")
        return reply(f"turn {number}", call("think", {"thought": f"hm {number}"}, f"call-{number}"))

    model = f"condensed-{agent}"
    server.policies[model] = policy
    options, limits = {"agent": agent, "condenser": CONDENSER}, Limits(max_turns=TURNS)
    episode = await play(server, model, options=options, limits=limits, **UNISOLATED)
    assert episode.failure is None and not off_policy_sampling(episode)
    assert len(episode.ends()) > 2
    turns = [node for node in episode.nodes if node.sampled and kind_of(node) == TURN]
    sampled = sum(len(node.tokens.sampled_ids) for node in turns if node.tokens is not None)
    assert trained(samples_of(episode)) == sampled > 2 * trained(samples_of(episode, leaf=episode.head))
    summaries = [node for node in episode.nodes if node.sampled and kind_of(node) == CONDENSATION]
    assert len(summaries) == len(episode.ends()) - 1
    assert all((node.message.content or "").startswith("summary") for node in summaries)
    # Of an agent of OpenHands a condensation is an iteration, too.
    assert len(episode.acted()) == TURNS - (0 if agent == "RLAgent" else len(summaries))
    assert episode.usage.calls == len(server.requests[model])


@pytest.mark.shows("condensation on request (/compact)")
def test_a_summary_that_the_model_asks_for(server: ScriptedModel, tmp_path: Path) -> None:
    """V0's way to ask for one is a tool, where the agent's settings offer it."""
    answers = [
        *(reply(None, call("think", {"thought": "hm"}, f"call-{turn}")) for turn in range(4)),
        reply("I forget.", call("request_condensation", {}, "call-4")),
        reply("summary of it"),
        reply(None, call("finish", {"message": "Done."}, "call-5")),
    ]
    server.script("requested", answers)
    condenser = {**CONDENSER, "max_size": 16, "keep_first": 1}
    options = HostOptions(environment_mode=False, condenser=condenser)
    config = controller_config(settings_for(server, "requested"), options)
    config.agents["RLAgent"].enable_condensation_request = True
    config.extended = ExtendedConfig({"rl": {**UNISOLATED, "storage": {"path": str(tmp_path)}}})
    asyncio.run(run_controller(config=config, initial_user_action=MessageAction(content="Think.")))
    (episode,) = asyncio.run(stored(tmp_path))
    summaries = [node for node in episode.nodes if node.sampled and kind_of(node) == CONDENSATION]
    assert [node.message.content for node in summaries] == ["summary of it"]
    assert episode.stop is StopReason.TERMINATED and len(episode.ends()) == 2
    assert episode.usage.calls == len(server.requests["requested"]) == len(answers)
