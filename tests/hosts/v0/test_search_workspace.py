"""Search inside OpenHands' controller, in copies of a real workspace: what is executed, sent, recorded and left."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import needs_bubblewrap
from scripted_model import ScriptedModel, call, prompt_ids, says, serve

from openhands_rl_plugin import FileTrajectoryStorage
from openhands_rl_plugin.config.rl import RLSettings, ServingSettings, WorkspaceSettings
from openhands_rl_plugin.config.workspace import PromptName
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import EpisodeRequest, FailureKind, Score, StopReason, Task, Trajectory
from openhands_rl_plugin.hosts.shared.sessions import HostOptions
from openhands_rl_plugin.hosts.v0.controller_session import ControllerRunner

pytestmark = [pytest.mark.contract, needs_bubblewrap]


BY_PATCH = {"value": "reward", "value_options": {"reward": "test_search_workspace:PatchReward"}}


class PatchReward:
    """1 when the workspace holds the right line, by the evidence of where the episode stands."""

    version = "patch-1"

    async def __call__(self, trajectory: Trajectory) -> Score:
        patch = str(trajectory.evidence.get("git_patch"))
        return Score(trajectory_id=trajectory.id, reward=float("+right" in patch), reward_version=self.version)


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedModel]:
    with serve() as model:
        yield model


def bash(command: str, id: str) -> dict[str, Any]:
    return says(None, call("execute_bash", {"command": command}, id))


def finish(id: str) -> dict[str, Any]:
    return says(None, call("finish", {"message": "done"}, id))


def depth(body: dict[str, Any]) -> int:
    return sum(message["role"] == "assistant" for message in body["messages"])


def writer(body: dict[str, Any]) -> dict[str, Any]:
    """Looks, then writes the right line or a wrong one, then finishes; which one, and with what id, is the seed's."""
    seed, turn = body["seed"], depth(body)
    if turn == 0:
        return bash("pwd; cat answer.txt 2>&1; echo note >> /tmp/notes; wc -l < /tmp/notes", f"look{seed % 2}")
    if turn == 1:
        return bash(
            "echo right > answer.txt" if seed % 3 == 0 else f"echo wrong{seed % 3} > answer.txt", f"write{seed}"
        )
    return finish(f"end{seed}")


async def play(
    server: ScriptedModel,
    model: str,
    policy: Any,
    *,
    options: HostOptions | None = None,
    storage_of_episodes: FileTrajectoryStorage | None = None,
    **settings: Any,
) -> Trajectory:
    server.policies[model] = policy
    own = RLSettings(
        serving=ServingSettings(base_url=server.url, model=model, request_timeout=20.0),
        **{"max_turns": 6, "max_obs_length": 4096, **settings},
    )
    options = options or HostOptions(environment_mode=False)
    runner = ControllerRunner(own, options, storage=storage_of_episodes)
    task = Task(id="t", environment="workspace", instruction="Write it.")
    try:
        return await runner.run(EpisodeRequest(task=task, run_id="r", group_id="g", seed=11))
    finally:
        await runner.close()


def mcts(**more: Any) -> dict[str, Any]:
    options = {"num_simulations": 8, "first_branches": 2, "num_branches": 3, "depth": 4, **BY_PATCH, **more}
    return {"rollout_strategy": "MCTS", "strategy": options}


def leftovers() -> list[str]:
    """Without what a process makes once and keeps while it lives."""
    found = [path.name for path in Path(tempfile.gettempdir()).glob("openhands-rl-of-*/*")]
    return [name for name in found if not re.search("-etc-", name)]


@pytest.mark.shows("search in forks: MCTS, ToT")
async def test_mcts_finds_what_is_right_and_plays_it(server: ScriptedModel):
    before = leftovers()
    trajectory = await play(server, "writer", writer, **mcts())
    assert trajectory.failure is None and trajectory.stop is StopReason.TERMINATED
    assert trajectory.strategy.options["num_simulations"] == 8
    assert "+right" in trajectory.evidence["git_patch"] and trajectory.evidence["changed_files"] == {
        "answer.txt": "added"
    }
    acted = [trajectory.nodes[at] for at in trajectory.path() if trajectory.nodes[at].sampled]
    assert [json.loads(node.message.tool_calls[0].arguments).get("command", "")[:4] for node in acted][-2:] == [
        "echo",
        "",
    ]
    tried = [node for node in trajectory.nodes if node.sampled and node.simulated]
    assert {"wrong1", "wrong2"} & {
        word for node in tried for word in str(node.message.tool_calls).split() if "wrong" in word
    }
    assert leftovers() == before, "no fork leaves files behind"


async def test_a_command_in_the_forks_says_what_is_right(server: ScriptedModel):
    """The project's tests as the value: each candidate is executed in a fork, and judged by the command there."""
    tests = "test ! -e answer.txt || grep -qx right answer.txt && touch ran"
    value = {"reward": "command", "reward_options": {"command": tests}}
    for strategy in ({"rollout_strategy": "BestOfN", "strategy": {"n": 4}}, mcts(num_simulations=6)):
        strategy["strategy"] |= {"value": "reward", "value_options": value}
        before = leftovers()
        trajectory = await play(server, "tested", writer, **strategy)
        assert trajectory.failure is None and trajectory.stop is StopReason.TERMINATED
        assert "+right" in trajectory.evidence["git_patch"]
        assert trajectory.evidence["changed_files"] == {"answer.txt": "added"}, "what it writes is no part of the work"
        found = {node.value for node in trajectory.nodes if node.sampled and node.value is not None}
        assert {0.0, 1.0} <= found
        assert leftovers() == before


async def test_a_branch_is_told_that_a_command_has_timed_out(server: ScriptedModel):
    def sleeper(body: dict[str, Any]) -> dict[str, Any]:
        if depth(body) > 0:
            return finish(f"end{body['seed']}")
        return says(None, call("execute_bash", {"command": "sleep 30", "timeout": 1}, f"sleep{body['seed']}"))

    strategy = {"num_branches": 2, "depth": 1, **BY_PATCH}
    trajectory = await play(server, "sleeper", sleeper, rollout_strategy="ToT", strategy=strategy, max_turns=1)
    assert trajectory.failure is None and trajectory.usage.steps == 1
    tried = [at for at, node in enumerate(trajectory.nodes) if node.sampled]
    told = [node.message.content for node in trajectory.nodes if node.parent in tried]
    assert told and all("[The command timed out after 1.0 seconds and was ended.]" in str(each) for each in told)


def states(requests: list[dict[str, Any]]) -> dict[int, list[list[dict[str, Any]]]]:
    """The conversations that were sent, by the number of answers in them."""
    found: dict[int, list[list[dict[str, Any]]]] = {}
    for body in requests:
        found.setdefault(depth(body), []).append(body["messages"])
    return found


@pytest.mark.parametrize(
    ("native", "prompt"),
    [(True, "standard"), (False, "standard"), (False, "compact")],
    ids=["native tool calls", "calls in the text", "compact"],
)
async def test_a_branchs_prompt_is_the_one_that_comes_later(server: ScriptedModel, native: bool, prompt: PromptName):
    """The same conversations are sent from branches and from the live session, to the letter and the token."""

    def policy(body: dict[str, Any]) -> dict[str, Any]:
        answer = writer(body) if depth(body) != 1 else says(f"I wonder {body['seed']}.")
        if native or not answer.get("tool_calls"):
            return answer
        one = answer["tool_calls"][0]["function"]
        risk = {"security_risk": "LOW"} if one["name"] == "execute_bash" else {}
        arguments = {**json.loads(one["arguments"]), **risk}
        lines = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in arguments.items())
        return says(f"Now.\n<function={one['name']}>\n{lines}</function>")

    name = f"same-{native}-{prompt}"
    options = HostOptions(environment_mode=False, native_tool_calling=native)
    strategy = {"rollout_strategy": "ToT", "strategy": {"num_branches": 2, "depth": 3, "beam": 2, **BY_PATCH}}
    instructed = WorkspaceSettings(prompt=prompt)
    trajectory = await play(server, name, policy, options=options, **strategy, workspace=instructed, max_turns=3)
    assert trajectory.failure is None
    sent = states(server.requests[name])
    opening = sent[0][0]
    assert all(messages[: len(opening)] == opening for later in sent.values() for messages in later)
    nodes = trajectory.nodes
    first, second = (
        at for at in trajectory.path() if nodes[at].sampled and nodes[at].parent != first_prompt(trajectory)
    )
    beside = [node for node in nodes if node.sampled and node.parent == nodes[first].parent]
    assert len({node.metadata["step"] for node in beside}) == 2, "asked here in a branch, and then in the live session"
    assert len({(node.tokens.extends, node.tokens.prompt_ids) for node in beside if node.tokens}) == 1
    assert not native or all(nodes[at].tokens.extends for at in (first, second) if nodes[at].tokens)
    heard = [(node.parent, node.message) for node in nodes if not node.sampled]
    assert len(set(heard)) == len(heard), "what a branch was told is what the live session is told"


def first_prompt(trajectory: Trajectory) -> int | None:
    return next(node.parent for node in trajectory.nodes if node.sampled)


SEARCHING = """
[rl]
max_turns = 6
max_obs_length = 4096
rollout_strategy = "MCTS"
storage = {{ path = "{folder}/trajectories" }}
[rl.strategy]
num_simulations = 6
first_branches = 2
num_branches = 3
value = "reward"
value_options = {{ reward = "test_search_workspace:PatchReward" }}
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_plain_openhands_searches_too(server: ScriptedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from test_agent_main import start

    server.policies["main"] = writer
    (tmp_path / "test_search_workspace.py").symlink_to(__file__)
    for helper in ("needs.py", "servers/scripted_model.py"):
        path = Path(__file__).parents[2] / "helpers" / helper
        (tmp_path / path.name).symlink_to(path)
    process = start(tmp_path, server, "main", SEARCHING, log_level="ERROR")
    try:
        await asyncio.to_thread(process.wait, 240)
    finally:
        process.kill()
    assert (tmp_path / "workspace" / "answer.txt").read_text() == "right\n"
    async with FileTrajectoryStorage(tmp_path / "trajectories") as storage:
        (trajectory,) = [found async for found, _ in storage.find()]
    assert trajectory.stop is StopReason.TERMINATED and "+right" in str(trajectory.evidence["git_patch"])
    assert trajectory.strategy.options["num_simulations"] == 6 and trajectory.usage.steps == 2
    assert trajectory.usage.calls == len(server.requests["main"])


def judging(body: dict[str, Any]) -> dict[str, Any]:
    """Answers the question of ``value = "model"``, and acts otherwise."""
    last = body["messages"][-1]
    asked = last["content"] if isinstance(last["content"], str) else last["content"][-1]["text"]
    return says("Yes") if "Yes or No" in asked else writer(body)


WITHOUT_FORKS = WorkspaceSettings(isolation="none")


async def test_mcts_without_isolation_is_refused_before_anything_is_asked(server: ScriptedModel):
    with pytest.raises(ConfigError, match=r"^MCTS needs an environment that can fork.*bubblewrap"):
        await play(server, "refused", writer, workspace=WITHOUT_FORKS, **mcts())
    assert not server.requests["refused"]


@pytest.mark.parametrize("strategy", ["ToT", "BestOfN"])
async def test_the_others_do_without_forks(server: ScriptedModel, strategy: str):
    own = {"workspace": WITHOUT_FORKS, "rollout_strategy": strategy}
    trajectory = await play(server, f"plain-{strategy}", judging, **own)
    assert trajectory.failure is None and trajectory.stop is StopReason.TERMINATED
    assert not any(node.simulated for node in trajectory.nodes)
    values = [node.value for node in trajectory.nodes if node.sampled]
    assert all(value is not None for value in values) and len(values) > trajectory.usage.steps
    with pytest.raises(ConfigError, match="needs an environment that can fork"):
        await play(server, "r", judging, **own, strategy={"value": "rollout"})


def sleeper(body: dict[str, Any]) -> dict[str, Any]:
    """Starts a process that goes on, then works; answers questions, too."""
    return judging(body) if depth(body) else bash("sleep 300 & until pgrep -x sleep; do :; done", "go")


async def test_background_processes_are_not_copied_but_refused(server: ScriptedModel):
    strategy = {"rollout_strategy": "ToT", "strategy": {"num_branches": 1, "depth": 1, **BY_PATCH}}
    trajectory = await play(server, "background", sleeper, **strategy)
    assert trajectory.failure is not None and trajectory.failure.kind is FailureKind.ENVIRONMENT
    assert "cannot be forked while processes run in it (sleep)" in trajectory.failure.message
    assert trajectory.usage.steps == 1, "the first turn was played, and its branch kept the process to itself"


@pytest.mark.parametrize("strategy", ["ToT", "BestOfN"])
async def test_while_background_processes_run_a_value_that_needs_no_forks_judges_without(
    server: ScriptedModel, strategy: str
):
    def policy(body: dict[str, Any]) -> dict[str, Any]:
        return judging(body) if "Yes or No" in str(body["messages"][-1]["content"]) else sleeper(body)

    trajectory = await play(server, f"sleeper-{strategy}", policy, rollout_strategy=strategy)
    assert trajectory.failure is None and trajectory.stop is StopReason.TERMINATED
    acted = [trajectory.nodes[at] for at in trajectory.path() if trajectory.nodes[at].sampled]
    reports = [str(node.metadata["search"]) for node in acted]
    assert ["without_forks" in report for report in reports] == [False, True, True]
    assert "cannot be forked while processes run in it (sleep)" in reports[1]


@pytest.mark.parametrize("strategy", ["ToT", "BestOfN", "MCTS"])
async def test_who_may_finish_or_go_on_finishes_when_the_work_is_done(server: ScriptedModel, strategy: str):
    """The model finds a finished episode good, and one that goes on not."""

    def policy(body: dict[str, Any]) -> dict[str, Any]:
        if "Yes or No" in str(body["messages"][-1]["content"]):
            return says("Yes" if "finish" in str(body["messages"][-2]) else "No")
        seed = body["seed"]
        if depth(body) == 0:
            return bash("echo right > answer.txt", f"write{seed}")
        return finish(f"end{seed}") if seed % 2 else bash("cat answer.txt", f"look{seed}")

    fewer = {"num_simulations": 6, "depth": 2} if strategy == "MCTS" else {}
    options = {"value": "model", **fewer}
    trajectory = await play(
        server, f"done-{strategy}", policy, rollout_strategy=strategy, strategy=options, max_turns=4
    )
    assert trajectory.failure is None and trajectory.stop is StopReason.TERMINATED
    assert trajectory.usage.steps < 4
    ends = [node for node in trajectory.nodes if "finish" in str(node.message.tool_calls) and node.visits]
    assert ends and all((node.value or 0.0) > 0.5 for node in ends)


async def test_mcts_says_what_to_set_where_its_value_adds_up_rewards(server: ScriptedModel):
    with pytest.raises(ConfigError, match=r"^MCTS with value = 'rollout' .* set value = \"model\", \"verifier\" or"):
        await play(server, "unset", writer, rollout_strategy="MCTS")
    assert not server.requests["unset"]


async def test_an_answer_that_does_not_parse_is_told_what_openhands_would_tell(server: ScriptedModel):
    def policy(body: dict[str, Any]) -> dict[str, Any]:
        return says(None, call("execute_bash", '{"command": ', "x")) if depth(body) == 0 else finish("end")

    strategy = {"rollout_strategy": "ToT", "strategy": {"num_branches": 1, "depth": 2, **BY_PATCH}}
    trajectory = await play(server, "malformed", policy, **strategy, max_turns=1)
    malformed = next(at for at, node in enumerate(trajectory.nodes) if node.sampled)
    told = [node.message.content for node in trajectory.nodes if node.parent == malformed]
    live = [node.message.content for node in trajectory.nodes if node.parent == trajectory.nodes[malformed].parent]
    assert len(told) == 1 and "Failed to parse tool call arguments" in str(told[0]) and told[0] in live


async def test_branches_side_by_side_hear_of_their_own_only(server: ScriptedModel, tmp_path: Path):
    def policy(body: dict[str, Any]) -> dict[str, Any]:
        seed = body["seed"]
        return bash(f"echo {seed} >> mine; echo {seed} >> /tmp/mine; cat mine /tmp/mine; ls | wc -l", f"id{seed}")

    strategy = {"rollout_strategy": "BestOfN", "strategy": {"n": 8, **BY_PATCH}}
    async with FileTrajectoryStorage(tmp_path) as storage:
        trajectory = await play(server, "beside", policy, **strategy, max_turns=2, storage_of_episodes=storage)
        assert [stored async for stored, _ in storage.find()] == [trajectory]
    nodes = trajectory.nodes
    tried = [at for at, node in enumerate(nodes) if node.sampled and node.parent == first_prompt(trajectory)]
    assert len(tried) == 8
    for at in tried:
        (heard,) = (node.message.content for node in nodes if node.parent == at)
        own = nodes[at].message.tool_calls[0].id.removeprefix("id")
        assert str(heard).split()[:3] == [own, own, "1"]


async def test_everything_that_was_sampled_is_counted(server: ScriptedModel):
    trajectory = await play(server, "counted", writer, **mcts(num_simulations=4, parallel=4))
    requests = server.requests["counted"]
    assert trajectory.usage.calls == len(requests)
    assert trajectory.usage.prompt_tokens == sum(len(prompt_ids(body["messages"])) for body in requests)
