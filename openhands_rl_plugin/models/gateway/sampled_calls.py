"""Tool calls that a client repaired and wrote anew, as they were sampled.

OpenHands' V1 SDK replays ``"[1, 2]"`` as ``[1, 2]``: for the model another text than it sampled, so that the prompt no
longer begins with what was sampled, and its token ids are stored again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from openhands_rl_plugin.core.messages import WireMessage, is_json_object, says
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import ToolCall
from openhands_rl_plugin.models.gateway.json_text import dump_object
from openhands_rl_plugin.models.gateway.requests import ClientRequest


def with_sampled_calls(call: ClientRequest, tree: EpisodeTree) -> tuple[ClientRequest, int]:
    """The chat completion's request with the calls of ``tree`` as they were sampled, and how many that changes.

    A call is known by its id. One whose sampled arguments are no JSON object stays as the client repaired it: servers
    refuse such a history.
    """
    messages, changed = [], 0
    for message, sampled in zip(call.messages, _sampled_calls(call.messages, tree), strict=True):
        calls = [_put_back(each, sampled) for each in message.get("tool_calls") or ()]
        different = sum(one is not other for one, other in zip(calls, message.get("tool_calls") or (), strict=True))
        messages.append({**message, "tool_calls": calls} if different else message)
        changed += different
    if not changed:
        return call, 0
    # The roles as they were sent: recorded messages have a system message for a developer's.
    sent = [
        {**given, "tool_calls": message["tool_calls"]} if message.get("tool_calls") else given
        for given, message in zip(call.document["messages"], messages, strict=True)
    ]
    document = {**call.document, "messages": sent}
    return replace(call, body=dump_object(document), document=document, messages=messages), changed


def _sampled_calls(messages: Sequence[WireMessage], tree: EpisodeTree) -> Iterator[Mapping[str, ToolCall]]:
    """The sampled calls by id, for each message: of the answer at its place, or those whose id is used once."""
    unique = _unique_calls(tree)
    at: int | None = None
    on_path = True
    for message in messages:
        at = _answer(tree, at, message) if on_path else None
        on_path = at is not None
        found = tree.nodes[at] if at is not None else None
        if found is not None and found.sampled:
            yield {each.id: each for each in found.message.tool_calls}
        else:
            yield unique if message["role"] == "assistant" else {}


def _answer(tree: EpisodeTree, parent: int | None, message: WireMessage) -> int | None:
    """The node below ``parent`` that says the message, or whose calls have the same ids."""
    children = tree.children(parent)[::-1]
    same = next((at for at in children if says(message, tree.nodes[at].message)), None)
    if same is not None or not (ids := [call.get("id") for call in message.get("tool_calls") or ()]):
        return same
    sampled = (at for at in children if tree.nodes[at].sampled)
    return next((at for at in sampled if [call.id for call in tree.nodes[at].message.tool_calls] == ids), None)


def _unique_calls(tree: EpisodeTree) -> Mapping[str, ToolCall]:
    found: dict[str, ToolCall | None] = {}
    for node in tree.nodes:
        for call in node.message.tool_calls if node.sampled else ():
            found[call.id] = None if call.id in found else call
    return {name: call for name, call in found.items() if call is not None and name}


def _put_back(call: WireMessage, sampled: Mapping[str, ToolCall]) -> WireMessage:
    own, said = sampled.get(call.get("id") or ""), call["function"]
    if own is None or (own.name, own.arguments) == (said["name"], said["arguments"]):
        return call
    if not is_json_object(own.arguments):
        return call
    return {**call, "function": {**said, "name": own.name, "arguments": own.arguments}}
