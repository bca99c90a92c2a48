"""The smaller formats: native SFT rows, verifier rows, AgentGym, predictions, and our own."""

from __future__ import annotations

import json

import pytest
from exchange_samples import DATA, call, reply, result, score, trajectory
from pydantic import JsonValue

from openhands_rl_plugin.core.types import JsonObject, Message, ToolCall
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError, Imported, LeftOutError, Record, row_episode
from openhands_rl_plugin.trajectories.exchange.formats import line_rows, prediction_rows, read_line, verifier_rows


def plain(row: JsonObject, **more: JsonValue) -> Record:
    """As it comes out of a file."""
    return Record({**json.loads(json.dumps(row)), **more})


def read_conversation(record: Record) -> Imported:
    return row_episode(record, "sft-native", record.messages("messages"))


def test_a_row_of_the_sampled_set_with_null_filled_unions() -> None:
    row = json.loads((DATA / "sampled_row.json").read_text())
    read = read_conversation(Record(row))
    found, scores = read.trajectory, read.scores
    assert found.run_id == "gpt-4o-2024-08-06_maxiter_50_N_v2.1-no-hint-train-t0-run_1"
    assert [message.content for message in found.messages()] == ["S", "Fix f.", None, "done", "Bye\nbye."]
    assert found.messages()[2].tool_calls == (ToolCall(id="call_1", name="execute_bash", arguments='{"command":"ls"}'),)
    schema = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    functions = [{"name": "execute_bash", "description": "Run.", "parameters": schema}]
    functions += [{"name": "finish", "description": "End."}]
    assert [*found.tools] == [{"type": "function", "function": each} for each in functions]
    assert scores[0].reward == 1.0 and found.evidence["resolved"] is True
    assert found.evidence["test_result"] == {"git_patch": "diff", "report": {"resolved": True}}


def test_the_verifier_prompt() -> None:
    messages = (
        Message(role="system", content="S"),
        Message(role="user", content="Fix f."),
        Message(role="user", content="Please."),
        reply(call("c1", "execute_bash", command="ls\npwd"), call("c2", "finish"), text="I look."),
        result("c1", "execute_bash", "a.py"),
    )
    episode = trajectory(messages)
    (row,) = verifier_rows(episode, (score(episode, 0.0, resolved=False),))
    system, user, assistant = [each for each in row["messages"] if isinstance(each, dict)]
    rule = "-" * 100
    assert (
        str(user["content"])
        .partition("=== INTERACTION LOG ===\n")[2]
        .startswith(
            "*** System Message that describes the assistant's behavior ***\nS\n"
            f"{rule}\n*** Turn 1 - USER ***\nFix f.\nPlease.\n"
            f"{rule}\n*** Turn 1 - ASSISTANT ***\nI look.\n"
            "### Tool Call 0\n<function=execute_bash>\n<parameter=command>\nls\npwd\n</parameter>\n</function>\n"
            "### Tool Call 1\n<function=finish>\n</function>\n"
            f"{rule}\n*** Turn 2 - TOOL EXECUTION RESULT ***\na.py\n{rule}\n"
        )
    )
    assert str(system["content"]).startswith("You are an expert judge evaluating AI assistant interactions.")
    assert assistant == {"role": "assistant", "content": "<judgement>NO</judgement>"}
    assert row["resolved"] is False and row["run_id"] == "night-3"
    with pytest.raises(LeftOutError, match="not judged"):
        list(verifier_rows(episode, ()))


def test_a_prediction_is_the_patch() -> None:
    patch = "diff --git a/a b/a\n+\N{SNOWMAN}\n"
    (row,) = prediction_rows(trajectory(evidence={"git_patch": patch}), ())
    assert row == {"instance_id": "repo__repo-1", "model_patch": patch, "model_name_or_path": "swe-v000007"}
    with pytest.raises(LeftOutError, match="no patch"):
        list(prediction_rows(trajectory(), ()))


def test_a_line_of_another_schema_or_with_scores_of_others_is_refused() -> None:
    with pytest.raises(ExchangeError, match="schema version 99 is newer"):
        read_line(Record({"trajectory": {"schema_version": 99}}))
    episode = trajectory()
    with pytest.raises(ExchangeError, match="another trajectory"):
        read_line(plain(next(line_rows(episode, (score(episode, 1.0).model_copy(update={"trajectory_id": "x"}),)))))
