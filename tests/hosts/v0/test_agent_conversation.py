"""The tree follows what the host sends: growth, replays in another form, rewritten histories."""

from __future__ import annotations

from openhands_rl_plugin.core.messages import to_message, to_wire
from openhands_rl_plugin.core.tree import EpisodeTree, HostConversation
from openhands_rl_plugin.core.types import Completion, Message, ToolCall


def system(text: str) -> dict:
    return {"role": "system", "content": [{"type": "text", "text": text}]}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def tool(text: str, id: str) -> dict:
    return {"role": "tool", "content": [{"type": "text", "text": text}], "tool_call_id": id, "name": "execute_bash"}


def act(tree: EpisodeTree, conversation: HostConversation, message: Message) -> int:
    node = tree.propose(Completion(message=message))
    conversation.acted(node)
    return node


def calling(id: str, text: str = "") -> Message:
    return Message(role="assistant", content=text or None, tool_calls=(ToolCall(id=id, name="execute_bash"),))


def begin() -> tuple[EpisodeTree, HostConversation, list[dict]]:
    tree = EpisodeTree()
    conversation = HostConversation(tree)
    prompt = [system("Help."), user("Do it.")]
    assert conversation.follow(prompt) is False
    return tree, conversation, prompt


def test_growth_adds_only_what_is_new():
    tree, conversation, prompt = begin()
    answer = act(tree, conversation, calling("1", "Look."))
    longer = [*prompt, to_wire(calling("1", "Look.")), tool("a file", "1")]
    assert conversation.follow(longer) is False
    assert tree.messages() == tuple(to_message(message) for message in longer)
    assert tree.nodes[tree.head or 0].parent == answer
    assert tree.usage.steps == 1
    assert "replayed_as" not in tree.nodes[answer].metadata


def test_the_same_prompt_again_changes_nothing():
    tree, conversation, prompt = begin()
    assert conversation.follow(prompt) is False
    assert len(tree.nodes) == 2 and tree.usage.steps == 0


def test_an_answer_stays_the_one_that_was_sampled_when_it_is_replayed_differently():
    tree, conversation, prompt = begin()
    answer = act(tree, conversation, Message(role="assistant", content="<function=ls>"))
    replay = {"role": "assistant", "content": "\n<function=ls>\n</function>"}
    for more in ([user("one")], [user("one"), user("two")]):
        assert conversation.follow([*prompt, replay, *more]) is False
    assert [node.message.content for node in tree.nodes] == ["Help.", "Do it.", "<function=ls>", "one", "two"]
    assert tree.nodes[answer].metadata["replayed_as"] == {"role": "assistant", "content": replay["content"]}


def test_an_answer_that_was_not_acted_on_is_never_taken_for_a_replay():
    tree, conversation, prompt = begin()
    rejected = tree.propose(Completion(message=calling("1")))
    conversation.follow([*prompt, user("That was no call.")])
    assert rejected not in tree.path()
    assert tree.nodes[tree.head or 0].parent == tree.nodes[rejected].parent


def test_a_rewritten_history_branches_where_it_differs_and_goes_on_there():
    tree, conversation, prompt = begin()
    first = act(tree, conversation, calling("1"))
    conversation.follow([*prompt, to_wire(calling("1")), tool("long output", "1")])
    act(tree, conversation, calling("2"))
    condensed = [*prompt, user("Summary: looked around."), to_wire(calling("2")), tool("short", "2")]
    assert conversation.follow(condensed) is True
    assert tree.messages() == tuple(to_message(message) for message in condensed)
    assert first not in tree.path()
    assert tree.nodes[tree.path()[2]].parent == 1
    assert tree.usage.steps == 2, "the second action was executed although its node is left behind"
    assert conversation.follow([*condensed, user("Go on.")]) is False


def test_tool_calls_must_be_the_same_to_be_a_replay():
    tree, conversation, prompt = begin()
    answer = act(tree, conversation, calling("1"))
    assert conversation.follow([*prompt, to_wire(calling("other")), tool("x", "other")]) is True
    assert answer not in tree.path()


def test_parts_that_are_no_text_are_named():
    parts = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": "data:..."}}]
    assert to_message({"role": "user", "content": parts}).content == "See\n[image_url]"
