"""The tools of an OpenEnv environment that is driven by MCP: listed and called by actions of their own."""

from __future__ import annotations

import json

from pydantic import JsonValue

from openhands_rl_plugin.core.errors import BadEnvironmentError
from openhands_rl_plugin.core.types import JsonObject, ToolCall
from openhands_rl_plugin.environments.http.calls import ServerTools, arguments_of
from openhands_rl_plugin.environments.http.client import RefusedActionError
from openhands_rl_plugin.environments.http.transport import excerpt

LIST: JsonObject = {"type": "list_tools"}
"""The action that asks for the tools."""

_RESERVED = frozenset({"reset", "step", "state", "close"})


def is_mcp(schema: JsonObject) -> bool:
    """Whether a server's actions are calls of tools, by the schema of an action."""
    properties = schema.get("properties")
    kind = properties.get("type") if isinstance(properties, dict) else None
    return isinstance(kind, dict) and "call_tool" in (kind.get("const"), kind.get("default"))


def tools_in(data: JsonObject, where: str) -> ServerTools:
    """The tools in the answer to ``LIST``. Raises ``BadEnvironmentError``, also where there is none."""
    observation = data.get("observation")
    listed = observation.get("tools") if isinstance(observation, dict) else None
    functions: list[JsonObject] = []
    for tool in listed if isinstance(listed, list) else ():
        if not isinstance(tool, dict):
            raise BadEnvironmentError(f"{where} listed {excerpt(repr(tool))}, which is no tool")
        parameters = tool.get("input_schema", tool.get("inputSchema"))
        functions.append({"name": tool.get("name"), "description": tool.get("description"), "parameters": parameters})
    if not functions:
        raise BadEnvironmentError(f"{where} listed no tools: {excerpt(json.dumps(observation))}")
    return ServerTools(functions, where, _RESERVED)


def action_of(call: ToolCall, tools: ServerTools) -> JsonObject:
    """The action that makes a call. Raises ``RefusedActionError``."""
    if call.name not in tools:
        raise tools.refused(call.name)
    try:
        arguments = arguments_of(call)
    except ValueError as error:
        raise RefusedActionError(f"Invalid action: the arguments of {call.name} are not JSON of an object") from error
    return {"type": "call_tool", "tool_name": call.name, "arguments": arguments}


def output_of(observation: JsonValue) -> str:
    """What a call returned, as text: the texts of the result, else its JSON, or the error."""
    found: JsonObject = observation if isinstance(observation, dict) else {}
    error, result = found.get("error"), found.get("result")
    if isinstance(error, dict):
        return f"{error.get('error_type')}: {error.get('message')}"
    if not isinstance(result, dict):
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    content = result.get("content")
    texts = [part.get("text") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    if texts and all(isinstance(text, str) for text in texts):
        return "\n".join(map(str, texts))
    shown = result.get("structured_content") or result.get("data") or result
    return json.dumps(shown, ensure_ascii=False)
