"""Trajectories for the exchange tests, built through the same tree as real ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    Completion,
    EpisodeRequest,
    Failure,
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
    Usage,
)

DATA = Path(__file__).parents[1] / "trajectories" / "exchange" / "data"
TOOLS: tuple[JsonObject, ...] = tuple(json.loads((DATA / "codeact_v2_tools.json").read_text()))
PROMPT = (DATA / "golden_system_prompt.txt").read_text()
SYSTEM = PROMPT[: PROMPT.index("\nYou have access to the following functions")]
POLICY = PolicyRef(base_model="tiny", adapter="swe", version=7)
INDENTED = "    def f(self):\n        return '</p> é \N{HOT BEVERAGE}'\n"


def call(identity: str, name: str, **arguments: object) -> ToolCall:
    return ToolCall(id=identity, name=name, arguments=json.dumps(arguments))


def reply(*calls: ToolCall, text: str | None = None) -> Message:
    return Message(role="assistant", content=text, tool_calls=calls)


def result(identity: str, name: str, text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id=identity, name=name)


CODE: tuple[Message, ...] = (
    Message(role="system", content=SYSTEM),
    Message(role="user", content="Fix f.\n"),
    reply(call("c1", "execute_bash", command="ls\n"), text="First a look."),
    result("c1", "execute_bash", "a.py\n[Command finished with exit code 0]"),
    reply(
        call("c2", "str_replace_editor", command="view", path="/a.py", view_range=[1, 20]),
        call("c3", "str_replace_editor", command="insert", path="/a.py", insert_line=3, new_str=INDENTED),
    ),
    result("c2", "str_replace_editor", "1\tclass A:\n"),
    result("c3", "str_replace_editor", "  edited"),
    reply(text="What now?"),
    Message(role="user", content="EXECUTION RESULT of [ls]:\nis what I typed."),
    reply(call("c4", "finish")),
)
"""Everything that a conversation with tools can have: two calls at once, typed and indented values, plain answers."""

SHOP: tuple[Message, ...] = (
    Message(role="user", content="You are web shopping."),
    Message(role="assistant", content="Ok."),
    Message(role="user", content="WebShop [SEP] Instruction: a red mug"),
    Message(role="assistant", content="Thought:\nI search.\n\nAction:\nsearch[red mug]"),
    Message(role="user", content="Results"),
    Message(role="assistant", content="Action:\nclick[buy]"),
)


def trajectory(
    messages: Sequence[Message] = CODE,
    *,
    identity: str = "00000000-0000-4000-8000-000000000001",
    task_id: str = "repo__repo-1",
    environment: str = "swe",
    reward: float | None = None,
    evidence: JsonObject | None = None,
    failure: Failure | None = None,
    stop: StopReason = StopReason.TERMINATED,
    tools: Sequence[JsonObject] = TOOLS,
    unsampled: Sequence[int] = (),
) -> Trajectory:
    """``reward`` is that of the last action; assistant messages are sampled, with tokens, but for ``unsampled``."""
    tree = EpisodeTree(tools=tools if any(message.tool_calls for message in messages) else ())
    for at, message in enumerate(messages):
        if message.role != "assistant" or at in unsampled:
            tree.head = tree.append(message)
            continue
        tokens = Tokens(prompt_ids=(1, 2, at), sampled_ids=(3, 4), logprobs=(-0.25, -0.5))
        usage = Usage(prompt_tokens=3, completion_tokens=2, calls=1)
        completion = Completion(message=message, tokens=tokens, usage=usage, policy=POLICY, finish_reason="stop")
        tree.commit(tree.propose(completion))
    sampled = [node for node in tree.nodes if node.sampled]
    if sampled:
        sampled[-1].reward = reward
    return tree.freeze(
        EpisodeRequest(task=_task(task_id, environment), run_id="night-3", group_id="group"),
        trajectory_id=identity,
        strategy=StrategySpec(name="StandardReAct"),
        policy=POLICY,
        stop=stop,
        times=Times(started=1_763_700_000.0, finished=1_763_700_010.0),
        evidence=evidence,
        failure=failure,
    )


def score(of: Trajectory, reward: float | None, **detail: object) -> Score:
    return Score(trajectory_id=of.id, reward=reward, detail=json.loads(json.dumps(detail)), reward_version="tests-1")


def same_talk(one: Sequence[Message], other: Sequence[Message]) -> bool:
    """Equal texts and calls; ids of calls and absent texts may differ."""
    return [_talk(message) for message in one] == [_talk(message) for message in other]


def _talk(message: Message) -> tuple[object, ...]:
    calls = [(each.name, json.loads(each.arguments)) for each in message.tool_calls]
    return message.role, message.content or "", calls, message.name


def _task(task_id: str, environment: str) -> Task:
    data: JsonObject = {"repo": "repo/repo", "FAIL_TO_PASS": ["test_f"]}
    return Task(id=task_id, environment=environment, instruction="Fix f.", data=data, split="train")
