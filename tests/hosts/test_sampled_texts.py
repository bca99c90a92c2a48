"""Answers whose calls are text go back to the model as it said them, where the host's form is the same call."""

from __future__ import annotations

import pytest

from openhands_rl_plugin.core.messages import to_wire
from openhands_rl_plugin.core.types import Completion, JsonObject, Message, ToolCall
from openhands_rl_plugin.hosts.sampled_texts import SampledTexts

ASKED = (Message(role="system", content="Help."), Message(role="user", content="Do it."))
CALL = "<function=edit>\n<parameter=path>a.py</parameter>\n<parameter=text>one\ntwo</parameter>\n</function>"
CUT = CALL.removesuffix("</function>")
HOST = "So.\n\n<function=edit>\n<parameter=path>a.py</parameter>\n<parameter=text>\none\ntwo\n</parameter>\n</function>"


def answered(text: str, finish: str = "stop", **choice: str | int | None) -> Completion:
    metadata: JsonObject = {"response": {"choices": [dict(choice)]}}
    return Completion(message=Message(role="assistant", content=text), finish_reason=finish, metadata=metadata)


def sent(answer: Completion, form: object, asked: tuple[Message, ...] = ASKED) -> object:
    """What the model is shown of an answer to ``ASKED`` that the host says as ``form`` after ``asked``."""
    said = SampledTexts()
    said.add(ASKED, answer)
    path = (*asked, answer.message, Message(role="user", content="done"))
    prompt = [to_wire(message) for message in path]
    prompt[-2] = {"role": "assistant", "content": form}
    restored = said.put_back(prompt, path)
    assert restored[:-2] + restored[-1:] == prompt[:-2] + prompt[-1:]
    shown = restored[-2]["content"]
    assert said.has(path[:-1], prompt[-2]) is (shown != form)
    return shown


@pytest.mark.parametrize(
    ("text", "choice", "shown"),
    [
        (f"So.\n{CALL}", {}, f"So.\n{CALL}"),
        (f"  So. \n{CALL}\n\n", {}, f"  So. \n{CALL}\n\n"),
        (f"So.\n{CUT}", {"stop_reason": "</function"}, f"So.\n{CALL}"),
        (f"So.\n{CUT}", {"matched_stop": "</function"}, f"So.\n{CALL}"),
        (f"So.\n{CUT}", {"provider_specific_fields": {"stop_reason": "</function"}}, f"So.\n{CALL}"),
        (f"So.\n{CUT}</function", {"stop_reason": "</function"}, f"So.\n{CALL}"),
        (f"So.\n{CUT}", {}, f"So.\n{CALL}"),
        (f"So.\n{CUT}", {"stop_reason": None}, f"So.\n{CUT}"),
        (f"So.\n{CUT}", {"stop_reason": 2}, f"So.\n{CUT}"),
    ],
)
def test_what_it_said_is_what_it_is_shown(text: str, choice: dict, shown: str) -> None:
    assert sent(answered(text, **choice), HOST) == shown


@pytest.mark.parametrize(
    "text",
    [
        f"Well.\n{CALL}",
        "So.\n" + CALL.replace("=edit", "=write"),
        "So.\n" + CALL.replace("one", "won"),
        "So.\n" + CALL.replace("<parameter=path>a.py", "<parameter=path=a.py"),
        "So.\n" + CALL.replace("<parameter=path>", "<parameter=risk>LOW</parameter>\n<parameter=path>"),
        f"So.\n{CALL}\nEXECUTION RESULT: it went well.",
        f"So.\n{CALL}\n{CALL}",
        f"<tool_call>So.\n{CALL}",
    ],
)
def test_another_call_is_sent_as_the_host_says_it(text: str) -> None:
    assert sent(answered(text), HOST) == HOST


def test_a_cut_value_is_none_of_the_hosts() -> None:
    whole = "<function=run>\n<parameter=command>ls</parameter>\n</function>"
    cut = "<function=run>\n<parameter=command>ls</parameter>\n<parameter=why>To s"
    assert sent(answered(cut, "length"), whole) == whole


def test_lists_have_other_spaces_and_texts_none_around_them() -> None:
    form = "<function=view>\n<parameter=view_range>[1, 40]</parameter>\n</function>"
    said = form.replace("[1, 40]", "[1,40]")
    assert sent(answered(said), form) == said
    assert sent(answered("  Done. \n"), "Done.") == "  Done. \n"
    assert sent(answered("Done."), "Done!") == "Done!"


def test_parts_stay_parts_with_their_mark() -> None:
    part = {"type": "text", "text": HOST, "cache_control": {"type": "ephemeral"}}
    assert sent(answered(f"So.\n{CUT}"), [part]) == [{**part, "text": f"So.\n{CALL}"}]


def test_nothing_of_another_conversation_is_sent() -> None:
    other = (ASKED[0], Message(role="user", content="Do that."))
    assert sent(answered(f"So.\n{CUT}"), HOST, other) == HOST
    said = SampledTexts()
    said.add(ASKED, answered(f"So.\n{CALL}"))
    prompt = [{"role": "assistant", "content": HOST}]
    assert said.put_back(prompt, (*ASKED, Message(role="assistant", content=HOST))) == prompt


def test_calls_by_the_api_are_none_of_text() -> None:
    said, call = SampledTexts(), ToolCall(id="1", name="edit")
    answer = Message(role="assistant", content="So. ", tool_calls=(call,))
    said.add(ASKED, Completion(message=answer))
    prompt = [to_wire(message) for message in (*ASKED, answer)]
    prompt[-1]["content"] = "So."
    assert said.put_back(prompt, (*ASKED, answer)) == prompt
