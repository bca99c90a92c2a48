"""What the SDK persists of a conversation of RLAgent, what RLAgent recorded, and the one read from the other."""

from __future__ import annotations

import json
from pathlib import Path

from openhands.sdk.context.condenser import LLMSummarizingCondenser
from scripted_model import ScriptedModel, call, says
from sdk_play import converse, finish, make_agent, make_llm, repair, stored, think

from openhands_rl_plugin.core.types import Message, ToolCall, Trajectory
from openhands_rl_plugin.trajectories.exchange.events import read_conversations


async def recorded(server: ScriptedModel, workspace: Path, name: str, answers: list[dict]) -> tuple[Trajectory, Path]:
    """The episode, and the folder of the SDK's own events."""
    server.script(name, answers)
    kept = workspace.parent / "kept"
    agent = make_agent(make_llm(server, name), workspace.parent / "store")
    conversation = converse(agent, workspace, persistence_dir=str(kept))
    conversation.send_message("Correct calc.py.")
    conversation.run()
    conversation.close()
    [episode] = await stored(workspace.parent / "store")
    return episode, kept


def imported(folder: Path) -> Trajectory:
    [unit] = read_conversations(folder)
    return unit.read().trajectory


def answers_to(workspace: Path) -> list[dict]:
    both = says("Both.", call("think", '{"thought":  "a"}', "call-a"), call("think", {"thought": "b"}, "call-b"))
    return [*repair(workspace)[:-1], both, think("again", "call-c"), finish(id="call-d")]


def calls_in(messages: tuple[Message, ...]) -> list[ToolCall]:
    return [each for message in messages for each in message.tool_calls]


def plain(messages: tuple[Message, ...]) -> list[Message]:
    return [message.model_copy(update={"content": message.content or None}) for message in messages]


async def test_the_sdks_own_events_hold_every_message_and_call_of_the_episode(
    server: ScriptedModel, workspace: Path
) -> None:
    episode, kept = await recorded(server, workspace, "persisted", answers_to(workspace))
    found = imported(kept)
    assert found.stop is episode.stop and found.task.instruction == episode.task.instruction
    ours, theirs = calls_in(episode.messages()), calls_in(found.messages())
    assert [(each.id, each.name) for each in theirs] == [(each.id, each.name) for each in ours] and len(ours) == 7
    # The SDK repairs the arguments of one and writes all anew; what they say is the same otherwise.
    repaired = [one.id for one, other in zip(ours, theirs, strict=True) if not same(one, other)]
    assert repaired in ([], ["call-1"])
    texts = [[message.content for message in plain(each.messages())] for each in (episode, found)]
    # The result of finish is an event, too, which no prompt had.
    assert texts[1] == [*texts[0], "done"]


def same(one: ToolCall, other: ToolCall) -> bool:
    return json.loads(one.arguments) == json.loads(other.arguments)


def seen(trajectory: Trajectory) -> list[list[tuple[str, str, list[str]]]]:
    """What the model saw before each answer that was acted on. New SDKs send messages of a user in a row as one."""
    prompts = []
    for at in trajectory.acted():
        prompt: list[tuple[str, str, list[str]]] = []
        for each in trajectory.messages(at)[:-1]:
            said = each.content or ""
            if each.role == "user" and prompt and prompt[-1][0] == "user":
                said = f"{prompt.pop()[1]}\n{said}"
            prompt.append((each.role, said, [call.id for call in each.tool_calls]))
        prompts.append(prompt)
    return prompts


async def test_a_condensed_conversation_is_read_as_the_model_saw_it(server: ScriptedModel, workspace: Path) -> None:
    said = iter(range(1000))

    def policy(body: dict) -> dict:
        number = next(said)
        if not body.get("tools"):
            return says(f"summary {number}")
        both = says(
            "Two.",
            call("think", {"thought": f"a{number}"}, f"a{number}"),
            call("think", {"thought": "b"}, f"b{number}"),
        )
        return finish() if number > 16 else both

    server.policies["condensing"] = policy
    kept, store = workspace.parent / "kept", workspace.parent / "store"
    condenser = LLMSummarizingCondenser(llm=make_llm(server, "condensing", usage_id="condenser"), max_size=14)
    conversation = converse(
        make_agent(make_llm(server, "condensing"), store, tools=(), condenser=condenser),
        workspace,
        persistence_dir=str(kept),
    )
    conversation.send_message("Think.")
    conversation.run()
    conversation.close()
    [episode] = await stored(store)
    found = imported(kept)
    assert found.evidence["condensations"] == len(episode.ends()) - 1 > 1
    assert len(found.acted()) == len(episode.acted())

    assert seen(found) == seen(episode)
