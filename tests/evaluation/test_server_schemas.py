"""Requests that Hypothesis makes from the JSON schemas of the four servers' bodies: none is answered with a failure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from evaluation.performance.servers.fuzz import Server, servers
from evaluation.performance.servers.requests import SURFACES

_EXAMPLES = 60
_SECONDS = 5.0
_ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=40),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)


def of_schema(schema: dict[str, Any], definitions: dict[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
    """Values of a JSON schema as pydantic writes it; one in a few has another type than the schema says."""
    if "$ref" in schema:
        return of_schema(definitions[schema["$ref"].rpartition("/")[2]], definitions, depth)
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return st.one_of([of_schema(each, definitions, depth + 1) for each in choices])
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    match schema.get("type"):
        case "object" if "properties" in schema:
            # A whole body is as valid as its schema; what lies deeper may be anything.
            given_fields = {
                name: of_schema(each, definitions, depth + 1) | (_ODD if depth else st.nothing())
                for name, each in schema["properties"].items()
            }
            needed = {name: given_fields.pop(name) for name in schema.get("required", [])}
            return st.fixed_dictionaries(needed, optional=given_fields)
        case "array":
            items = schema.get("items", {})
            return st.lists(of_schema(items, definitions, depth + 1), max_size=3)
        case "string":
            return st.text(max_size=20)
        case "integer":
            return st.integers(schema.get("minimum", -(2**64)), schema.get("maximum", 2**64))
        case "number":
            return st.floats(schema.get("minimum"), schema.get("maximum"), allow_nan=False)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case _:
            return _ODD


@pytest.fixture(scope="module")
def found(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    with servers(str(model), tmp_path_factory.mktemp("servers")) as each:
        yield {server.name: server for server in each}


_ROUTES = [(name, path) for name, surface in SURFACES.items() for path, (kind, _) in surface.bodies.items() if kind]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "path"), _ROUTES)
def test_a_body_of_the_schema_is_served_or_refused(found: dict[str, Server], name: str, path: str) -> None:
    kind, valid = SURFACES[name].bodies[path]
    assert kind is not None
    schema = TypeAdapter(kind).json_schema()
    fields = of_schema(schema, schema.get("$defs", {}))
    server = found[name]

    with httpx.Client(base_url=server.url, trust_env=False, timeout=_SECONDS) as client:

        @settings(max_examples=_EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(body=fields, kept=st.sets(st.sampled_from(sorted(valid))))
        def ask(body: dict[str, Any], kept: set[str]) -> None:
            whole = {**body, **{key: valid[key] for key in kept}, "max_tokens": 2}
            try:
                content = json.dumps(whole).encode()
            except UnicodeEncodeError:
                return
            headers = {"content-type": "application/json"}
            answer = client.post(path, content=content, headers=headers)
            assert answer.status_code < 500, (answer.status_code, answer.text[:300], content[:500])
            assert "Traceback" not in answer.text

        ask()
    assert server.process.poll() is None
    assert "Traceback" not in server.log.read_text(errors="replace")
