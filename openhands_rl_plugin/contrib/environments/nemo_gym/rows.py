"""A row of a NeMo Gym data set: its prompt as messages, its tools, and why it cannot be played, if so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import JsonValue

from openhands_rl_plugin.core.errors import BadEnvironmentError
from openhands_rl_plugin.core.types import JsonObject, Message, ToolCall
from openhands_rl_plugin.environments.http.calls import ServerTools
from openhands_rl_plugin.environments.http.transport import excerpt

PARAMETERS = "responses_create_params"

_RESERVED = frozenset({"verify", "seed_session", "aggregate_metrics", "reset", "step", "close", "mcp"})
_TEXTS = frozenset({"input_text", "output_text", "text", "refusal"})
_SYSTEM = frozenset({"system", "developer"})
# Agents of NeMo Gym that add what no resources server has, such as a repository, a shell or a world of their own.
_AGENTS = ("aviary", "codex", "claude_code", "cvdp", "harbor", "mini_swe", "opencode", "openclaw", "swe_agents", "tau2")
# Servers whose verification looks at the call itself, and that have no endpoint for it.
_CALL_IS_ANSWER = frozenset(
    {
        "example_tool_call_multireward",
        "single_step_tool_use_with_argument_comparison",
        "structured_outputs",
        "swe_pivot",
        "xlam_fc",
    }
)


@dataclass(frozen=True)
class GymRow:
    """A checked row. ``body`` is sent with every request; ``system`` are the texts of its instructions, ``turns`` the
    rest of its prompt. ``call_is_answer``: known to be graded by its call, which nobody executes."""

    body: JsonObject
    system: tuple[str, ...]
    turns: tuple[Message, ...]
    tools: ServerTools
    call_is_answer: bool

    @classmethod
    def of(cls, body: JsonObject, task: str, environment: str) -> GymRow:
        """Check a row. Raises ``BadEnvironmentError`` that says why it cannot be played as a conversation in text."""
        where = f"task '{task}' cannot be played"
        parameters = body.get(PARAMETERS)
        found: JsonObject = parameters if isinstance(parameters, dict) else {}
        agent = body.get("agent_ref")
        name = agent.get("name") if isinstance(agent, dict) else None
        if isinstance(name, str) and (own := next((each for each in _AGENTS if each in name), None)) is not None:
            raise BadEnvironmentError(
                f"{where}: its agent {excerpt(name)!r} ({own}) adds what its server does not have"
            )
        _refuse_media(found.get("metadata"), where)
        turns = tuple(_turns(found.get("input"), where))
        instructions = found.get("instructions")
        system = [instructions] if isinstance(instructions, str) and instructions else []
        system += [each.content for each in turns if each.role == "system" and each.content]
        return cls(
            body=body,
            system=tuple(system),
            turns=tuple(each for each in turns if each.role != "system"),
            tools=_tools(found, where),
            call_is_answer=bool(body.keys() & {"expected_action", "expected_call"})
            or body.get("response_mode") == "tool_call"
            or environment.rpartition("/")[2] in _CALL_IS_ANSWER,
        )

    def refuse_unanswered(self, seeded: JsonValue, task: str) -> None:
        """Raise ``BadEnvironmentError`` for a server that answers ``/seed_session`` with a world of its own."""
        for key, what in (("env_id", "steps through a world of its own"), ("mcp", "offers its tools by MCP only")):
            if isinstance(seeded, dict) and seeded.get(key) is not None and not self.tools:
                raise BadEnvironmentError(f"task '{task}' cannot be played: its server {what}, which no row describes")


def _refuse_media(metadata: JsonValue, where: str) -> None:
    for key, value in metadata.items() if isinstance(metadata, dict) else ():
        if isinstance(value, str) and value.startswith("data:"):
            raise BadEnvironmentError(
                f"{where}: its '{key}' is {value[5:].partition(';')[0]}, and a prompt here is text"
            )


def _tools(parameters: JsonObject, where: str) -> ServerTools:
    given = parameters.get("tools")
    tools: list[JsonObject] = []
    # The model is told of tools that it may not use, but no call of them is wanted.
    for tool in given if isinstance(given, list) and parameters.get("tool_choice") != "none" else ():
        kind = tool.get("type", "function") if isinstance(tool, dict) else tool
        if not isinstance(tool, dict) or kind != "function":
            raise BadEnvironmentError(f"{where}: its tool of type {excerpt(repr(kind))} is no function of its server")
        tools.append(tool)
    return ServerTools(tools, where, _RESERVED)


def _turns(prompt: JsonValue, where: str) -> Iterator[Message]:
    if isinstance(prompt, str):
        yield from [Message(role="user", content=prompt)] if prompt else []
        return
    for item in prompt if isinstance(prompt, list) else ():
        if not isinstance(item, dict):
            raise BadEnvironmentError(f"{where}: its prompt holds {excerpt(repr(item))}, which is no message")
        kind = item.get("type", "message")
        if kind == "reasoning":  # of an earlier turn: chat templates leave it out
            continue
        if kind == "function_call":
            call = ToolCall(
                id=str(item.get("call_id")), name=str(item.get("name")), arguments=str(item.get("arguments"))
            )
            yield Message(role="assistant", tool_calls=(call,))
        elif kind == "function_call_output":
            output = item.get("output")
            text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
            yield Message(role="tool", content=text, tool_call_id=str(item.get("call_id")))
        elif kind == "message":
            yield from _message(item, where)
        else:
            raise BadEnvironmentError(f"{where}: its prompt holds a {excerpt(repr(kind))}, which is no text")


def _message(item: JsonObject, where: str) -> Iterator[Message]:
    role, content = item.get("role"), item.get("content")
    text = content if isinstance(content, str) else "\n".join(_parts(content, where))
    if text and role in ("user", "assistant"):
        yield Message(role=role, content=text)
    elif text and role in _SYSTEM:
        yield Message(role="system", content=text)
    elif text:
        raise BadEnvironmentError(f"{where}: its prompt holds a message of role {excerpt(repr(role))}")


def _parts(content: JsonValue, where: str) -> Iterator[str]:
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind not in _TEXTS:
            raise BadEnvironmentError(f"{where}: its prompt holds an {excerpt(str(kind))}, and a prompt here is text")
        if isinstance(text := part.get("text"), str):
            yield text
