"""Tool calls that a client repairs go to the model server as they were sampled, when that is asked for."""

from __future__ import annotations

import json
from pathlib import Path

from aiohttp import web
from gateway_world import SYSTEM, TOOL, Body, Model, sampled_ids, user, world

SAMPLED = '{"path": "a.py",  "view_range": "[1, 2]"}'


class Caller:
    """Calls ``view`` in every answer, with the arguments of its turn."""

    def __init__(self, *arguments: str, same_id: bool = False) -> None:
        self._arguments = arguments
        self._same_id = same_id
        self._turns = 0
        self.model = Model(behave=self)

    async def __call__(self, request: web.Request, body: Body) -> web.Response:
        function = {"name": "view", "arguments": self._arguments[self._turns]}
        identity = "call_0" if self._same_id else f"call_{self._turns}"
        message = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": identity, "type": "function", "function": function}],
        }
        self._turns += 1
        answer = self.model.completion({**body, "n": 1})
        entry = answer["choices"][0]["logprobs"]["content"][0]
        ids = sampled_ids(message)
        answer["choices"][0] |= {"message": message, "token_ids": ids, "logprobs": {"content": [entry for _ in ids]}}
        return web.json_response(answer)


def repaired(message: Body) -> Body:
    """As OpenHands' SDK replays it: another text of the arguments."""
    calls = []
    for call in message["tool_calls"]:
        try:
            arguments = json.loads(call["function"]["arguments"])
            arguments |= {"view_range": json.loads(arguments["view_range"])} if "view_range" in arguments else {}
        except ValueError:
            arguments = {}
        calls.append({**call, "function": {**call["function"], "arguments": json.dumps(arguments)}})
    return {**message, "tool_calls": calls}


async def played(path: Path, caller: Caller, turns: int, **options: bool) -> tuple[list[Body], list[bool]]:
    """What the server was sent last, and which prompts extend the one before."""
    messages: list[Body] = [SYSTEM, user("look")]
    async with world(path, caller.model, **options) as gateway:
        for _ in range(turns):
            said = repaired(await gateway.say(*messages, tools=[TOOL]))
            result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "1 line"}
            messages += [said, result]
        (trajectory,) = await gateway.stored()
    extends = [node.tokens.extends for node in trajectory.sampled() if node.tokens]
    assert len(extends) == turns
    return caller.model.bodies[-1]["messages"], extends


def arguments_in(messages: list[Body]) -> list[str]:
    return [call["function"]["arguments"] for each in messages for call in each.get("tool_calls") or ()]


async def test_repaired_calls_are_put_back_and_every_prompt_extends_the_one_before(tmp_path: Path):
    sent, extends = await played(tmp_path, Caller(*[SAMPLED] * 4), 4, restore_calls=True)
    assert arguments_in(sent) == [SAMPLED] * 3
    assert extends == [False, True, True, True]
