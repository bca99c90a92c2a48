"""Parses a model's text into an OpenEnv action, by the schema that the server publishes."""

from __future__ import annotations

import json

from pydantic import JsonValue

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.environments.http.client import RefusedActionError

_DEEPEST = 8
_BASE_FIELD = "metadata"


class ActionForm:
    """The fields of a server's actions. The server checks their values.

    A JSON object with these names only is the action itself. Any other text is the value of ``field``, else of the only
    field, else of the only required one. Raises ``ConfigError`` when ``field`` is not a field of the actions.
    """

    def __init__(self, schema: JsonObject, field: str | None = None) -> None:
        properties = schema.get("properties")
        found = properties if isinstance(properties, dict) else {}
        self._schema = schema
        self._names = frozenset(found)
        # A field with a single possible value needs no description.
        self._fields = {
            name: each
            for name, each in found.items()
            if name != _BASE_FIELD and isinstance(each, dict) and "const" not in each
        }
        required = schema.get("required")
        self._required = [name for name in required if name in self._fields] if isinstance(required, list) else []
        if field is not None and found and field not in found:
            raise ConfigError(
                f"action_field {field!r} is not a field of the server's actions; these have {', '.join(self._fields)}"
            )
        self._field = field or _only(list(self._fields)) or _only(self._required)

    def read(self, text: str) -> JsonObject:
        """The action in ``text``. Raises ``RefusedActionError``, whose message describes valid actions to the model."""
        value = _json_or_none(text)
        if isinstance(value, dict) and (not self._names or self._names.issuperset(value)):
            return value
        if self._field is None:
            raise RefusedActionError(f"Invalid action: {self.language() or 'it must be a JSON object.'}")
        if value is None or self._is_text(self._fields.get(self._field, {"type": "string"}), _DEEPEST):
            return {self._field: text}
        return {self._field: value}

    def language(self) -> str:
        """The description of the actions for the prompt; empty where the server publishes no schema."""
        if (only := _only(list(self._fields))) is not None:
            return f"<{only}> - {self._worded(self._fields[only])}".removesuffix(" - ")
        lines = (
            f"  {name} ({'required' if name in self._required else 'optional'}) - {self._worded(each)}".rstrip(" -")
            for name, each in self._fields.items()
        )
        return "\n".join(["a JSON object with these fields:", *lines]) if self._fields else ""

    def _worded(self, schema: JsonObject) -> str:
        resolved = self._resolved(schema, _DEEPEST)
        values = resolved.get("enum")
        kind = resolved.get("type")
        what = f"one of {', '.join(map(str, values))}" if isinstance(values, list) else str(kind or "")
        description = schema.get("description") or resolved.get("description")
        return f"{what}: {description}" if what and isinstance(description, str) else what or str(description or "")

    def _is_text(self, schema: JsonObject, depth: int) -> bool:
        resolved = self._resolved(schema, depth)
        choices = resolved.get("anyOf")
        if isinstance(choices, list) and depth:
            return any(isinstance(each, dict) and self._is_text(each, depth - 1) for each in choices)
        return resolved.get("type") == "string"

    def _resolved(self, schema: JsonObject, depth: int) -> JsonObject:
        """The schema that a ``$ref`` refers to."""
        reference, definitions = schema.get("$ref"), self._schema.get("$defs")
        if not depth or not isinstance(reference, str) or not isinstance(definitions, dict):
            return schema
        target = definitions.get(reference.rpartition("/")[2])
        return self._resolved(target, depth - 1) if isinstance(target, dict) else schema


def _only(names: list[str]) -> str | None:
    return names[0] if len(names) == 1 else None


def _json_or_none(text: str) -> JsonValue:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
