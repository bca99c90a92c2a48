"""Requests with values that no client should send: refused one by one, while the server goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

NUMBERS = [
    *("9223372036854775807", "9223372036854775808", "-9223372036854775809", "1" + "0" * 400, "1e999", "-1e999"),
    *("NaN", "Infinity", "-1", "-2", "0", "0.5", "3.0", "2147483647", "2147483648", "1e-300", "true", "null", '"7"'),
    *("[]", "{}", '""'),
]
FIELDS = [
    *("temperature", "top_p", "top_k", "n", "max_tokens", "max_completion_tokens", "seed", "top_logprobs"),
    *("prompt_logprobs", "stop_token_ids", "presence_penalty", "min_p", "repetition_penalty", "logit_bias"),
]


@pytest.fixture
def http(server: str) -> Iterator[httpx.Client]:
    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=server, timeout=30, headers=headers, trust_env=False) as client:
        yield client


def ask(http: httpx.Client, **fields: object) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 2, **fields}
    return http.post("/v1/chat/completions", content=json.dumps(body))


@pytest.mark.parametrize("field", FIELDS)
def test_a_number_is_served_or_refused_at_the_door(http: httpx.Client, field: str) -> None:
    for value in NUMBERS:
        text = '{"messages": [{"role": "user", "content": "one"}], "logprobs": true, "max_tokens": 2, "n": 1, %s}'
        answer = http.post("/v1/chat/completions", content=text % f'"{field}": {value}')
        assert answer.status_code in (200, 400), (value, answer.text)
    assert ask(http).status_code == 200 and http.get("/health").status_code == 200


def test_a_list_with_a_million_errors_is_one(http: httpx.Client) -> None:
    for wrong in ('{"messages": [%s]}', '{"prompt": [%s, "a"]}', '{"prompt": "a", "stop_token_ids": [%s]}'):
        path = "/v1/chat/completions" if "messages" in wrong else "/v1/completions"
        answer = http.post(path, content=wrong % ",".join(["-7"] * 60_000))
        assert answer.status_code == 400 and len(answer.text) < 2000


@pytest.mark.parametrize("arguments", ["[" * 3000, '{"a":' * 3000 + "1" + "}" * 3000])
def test_arguments_nested_too_deeply_are_refused(http: httpx.Client, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "tool_calls": [call]}]
    answer = ask(http, messages=messages)
    assert answer.status_code == 400 and "recursion" in answer.text


@pytest.mark.parametrize("path", ["x" * 4000, "\u00e9/" * 1000, "a\u0000b", "/proc/1/root/x", ""])
def test_a_path_that_cannot_be_is_refused(http: httpx.Client, path: str) -> None:
    load = http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": path})
    replace = http.post("/update_weights_from_disk", json={"model_path": path, "weight_version": "x"})
    assert {load.status_code, replace.status_code} <= {400, 404}
