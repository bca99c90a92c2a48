"""ATIF out and in again: messages, calls, reasoning, token ids, logprobs, rewards and the judgement are the same."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as some

from openhands_rl_plugin.core.messages import reasoning_of
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    Completion,
    EpisodeRequest,
    JsonObject,
    Message,
    PolicyRef,
    Score,
    StopReason,
    StrategySpec,
    Task,
    Times,
    Tokens,
    ToolCall,
    Trajectory,
)
from openhands_rl_plugin.trajectories.exchange.events import atif_rows, read_atif
from openhands_rl_plugin.trajectories.exchange.foreign import Record

POLICY = PolicyRef(base_model="tiny", adapter="swe", version=7)
TOOL: JsonObject = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
TEXT = some.text(some.characters(codec="utf-8"), max_size=20)
IDS = some.lists(some.integers(0, 2**31), min_size=1, max_size=4).map(tuple)
ARGUMENTS = some.one_of(
    some.dictionaries(TEXT, some.one_of(TEXT, some.integers(-5, 5), some.none(), some.booleans()), max_size=3).map(
        json.dumps
    ),
    TEXT,
)
ANSWER = some.fixed_dictionaries(
    {
        "content": some.one_of(some.none(), TEXT),
        "arguments": some.lists(ARGUMENTS, max_size=2),
        "answered": some.booleans(),
        "reasoning": some.one_of(some.none(), TEXT.filter(bool)),
        "prompt": some.one_of(some.none(), IDS),
        "sampled": IDS,
        "extends": some.booleans(),
        "logprobs": some.booleans(),
        "reward": some.one_of(some.none(), some.floats(-1, 1)),
        "user": some.one_of(some.none(), TEXT),
    }
)


def episode(answers: list[dict[str, object]]) -> Trajectory:
    tree = EpisodeTree(tools=(TOOL,))
    for message in (Message(role="system", content="Rules."), Message(role="user", content="Fix f.")):
        tree.head = tree.append(message)
    held: tuple[int, ...] = ()
    for number, drawn in enumerate(answers):
        each: dict[str, object] = drawn
        calls = tuple(
            ToolCall(id=f"c{number}.{at}", name="bash", arguments=str(text))
            for at, text in enumerate(each["arguments"])
        )
        tokens = None
        if (prompt := each["prompt"]) is not None:
            sampled: tuple[int, ...] = each["sampled"]
            whole = (*held, *prompt) if each["extends"] else tuple(prompt)
            logprobs = (-0.125,) * len(sampled) if each["logprobs"] else ()
            tokens = Tokens(prompt_ids=whole, sampled_ids=sampled, logprobs=logprobs)
            held = (*whole, *sampled)
        metadata: JsonObject = {"reasoning_content": str(each["reasoning"])} if each["reasoning"] else {}
        turn = Message(role="assistant", content=each["content"], tool_calls=calls)
        answer = Completion(message=turn, tokens=tokens, finish_reason="stop", policy=POLICY, metadata=metadata)
        tree.commit(tree.propose(answer))
        tree.nodes[-1].reward = each["reward"]
        for call in calls if each["answered"] else ():
            tree.head = tree.append(Message(role="tool", content="out", tool_call_id=call.id, name="bash"))
        if each["user"] is not None:
            tree.head = tree.append(Message(role="user", content=str(each["user"])))
    return tree.freeze(
        EpisodeRequest(task=Task(id="t", environment="swe", data={"repo": "a/b"}), run_id="r", group_id="g"),
        trajectory_id="00000000-0000-4000-8000-0000000000ab",
        strategy=StrategySpec(name="StandardReAct"),
        policy=POLICY,
        stop=StopReason.MAX_TURNS,
        times=Times(started=1_763_700_000.0, finished=1_763_700_010.0),
        evidence={"git_patch": "diff"},
    )


@given(some.lists(ANSWER, min_size=1, max_size=4), some.one_of(some.none(), some.floats(0, 1)))
def test_nothing_is_lost(answers: list[dict[str, object]], reward: float | None) -> None:
    before = episode(answers)
    scores = [] if reward is None else [Score(trajectory_id=before.id, reward=reward, reward_version="tests-1")]
    (row,) = atif_rows(before, scores)
    read = read_atif(Record(json.loads(json.dumps(row))))
    found, judged = read.trajectory, read.scores
    assert [node.message for node in found.nodes] == [node.message for node in before.nodes]
    assert [node.tokens for node in found.nodes] == [node.tokens for node in before.nodes]
    assert [(node.reward, node.finish_reason, node.policy, node.sampled) for node in found.nodes] == [
        (node.reward, node.finish_reason, node.policy, node.sampled) for node in before.nodes
    ]
    assert list(map(reasoning_of, found.nodes)) == list(map(reasoning_of, before.nodes))
    assert (found.task, found.run_id, found.group_id, found.policy, found.stop, found.tools, found.times) == (
        *(before.task, before.run_id, before.group_id, before.policy, before.stop, before.tools, before.times),
    )
    assert found.evidence["git_patch"] == "diff"
    if reward is not None:
        assert judged[0].reward == reward
