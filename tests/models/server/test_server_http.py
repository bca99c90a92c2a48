"""The HTTP surface, through OpenAI's own client where it reaches and plain HTTP where it does not."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest

from openhands_rl_plugin.core.types import ToolCall
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.generator.generator import Generator
from openhands_rl_plugin.models.generator.sequence import Generation, ScoredToken
from openhands_rl_plugin.models.server.app import running_server
from openhands_rl_plugin.models.server.wire import ParsedText, parse_tool_calls

pytestmark = pytest.mark.contract

MESSAGES = [{"role": "user", "content": "one two three"}]


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client


def error(response: httpx.Response) -> dict[str, object]:
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == response.status_code
    return body["error"]


def test_chat_with_token_ids_and_logprobs(client: openai.OpenAI, generator: Generator) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": [{"type": "text", "text": "be brief"}]}, *MESSAGES],
        max_tokens=8,
        seed=3,
        n=2,
        logprobs=True,
        top_logprobs=2,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    tokenizer = generator.tokenizer
    prompt = tokenizer.decode(answer.prompt_token_ids)
    assert prompt.startswith("<|im_start|>system\nbe brief<|im_end|>") and prompt.endswith("assistant\n")
    assert answer.usage.prompt_tokens == len(answer.prompt_token_ids)
    assert answer.usage.completion_tokens == 16
    assert len(answer.choices) == 2 and answer.choices[0].token_ids != answer.choices[1].token_ids
    for choice in answer.choices:
        assert choice.finish_reason == "length"
        assert tokenizer.decode(choice.token_ids, skip_special_tokens=True) == choice.message.content
        assert len(choice.logprobs.content) == len(choice.token_ids) == 8
        assert all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in choice.logprobs.content)


def test_streaming_equals_not_streaming(client: openai.OpenAI) -> None:
    options = {
        "model": "b",
        "messages": MESSAGES,
        "max_tokens": 25,
        "seed": 5,
        "n": 2,
        "logprobs": True,
        "stop": ["zzzz"],
        "extra_body": {"return_token_ids": True},
    }
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    for choice in whole.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert [i for part in parts for i in getattr(part, "token_ids", None) or []] == choice.token_ids
        streamed = [one.logprob for part in parts if part.logprobs for one in part.logprobs.content]
        assert streamed == pytest.approx([one.logprob for one in choice.logprobs.content], abs=1e-4)
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]


def test_text_completion(client: openai.OpenAI, generator: Generator) -> None:
    options = {"model": "tiny", "max_tokens": 6, "temperature": 0, "logprobs": 1}
    ids = generator.tokenizer.encode("the quick", add_special_tokens=False)
    extra = {"return_token_ids": True, "prompt_logprobs": 1, "ignore_eos": True}
    by_ids = client.completions.create(**options, prompt=ids, extra_body=extra)
    by_text = client.completions.create(**options, prompt="the quick", extra_body=extra)
    choice = by_text.choices[0]
    assert choice.text == by_ids.choices[0].text
    assert choice.prompt_token_ids == ids and len(choice.token_ids) == 6
    assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.tokens) == 6
    assert choice.prompt_logprobs[0] is None and len(choice.prompt_logprobs) == len(ids)
    given = choice.prompt_logprobs[1][str(ids[1])]
    assert given["logprob"] < 0 and given["rank"] >= 1 and given["decoded_token"]
    with pytest.raises(openai.BadRequestError, match="stream"):
        client.completions.create(**options, prompt="the quick", stream=True)
    several = client.completions.create(model="tiny", prompt="two three", n=2, max_tokens=3)
    assert [choice.index for choice in several.choices] == [0, 1]


def test_tokenize_agrees_with_chat(http: httpx.Client, client: openai.OpenAI) -> None:
    body = http.post("/tokenize", json={"model": "tiny", "messages": MESSAGES}).json()
    chat = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=1, extra_body={"return_token_ids": True}
    )
    assert body == {"count": len(body["tokens"]), "max_model_len": 512, "tokens": chat.prompt_token_ids}
    text = http.post("/tokenize", json={"prompt": "one two"}).json()
    assert text["count"] == len(text["tokens"]) > 0


def test_models_and_health(client: openai.OpenAI, http: httpx.Client, adapter_a: Path) -> None:
    cards = {card.id: card for card in client.models.list()}
    assert set(cards) == {"tiny", "a", "b"}
    assert cards["a"].root == str(adapter_a) and cards["a"].parent == "tiny" and cards["tiny"].parent is None
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/v1/chat/completions", {"model": "nope", "messages": MESSAGES}, 404, "The model `nope` does not exist."),
        ("/v1/chat/completions", {"messages": MESSAGES, "temperature": -1}, 400, "temperature"),
        ("/v1/chat/completions", {"messages": MESSAGES, "top_logprobs": 3}, 400, "logprobs"),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 600}, 400, "maximum context length is 512"),
        ("/v1/completions", {"prompt": "x " * 900}, 400, "maximum context"),
        ("/v1/chat/completions", {"messages": MESSAGES, "presence_penalty": 0.5}, 400, "presence_penalty"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
            "text",
        ),
        ("/v1/completions", {"prompt": [1, 2, 99999]}, 400, "out of vocabulary"),
        ("/v1/completions", {"prompt": []}, 400, "empty"),
        ("/v1/nope", {}, 404, "Not Found"),
    ],
)
def test_refusals(http: httpx.Client, path: str, body: dict[str, object], status: int, text: str) -> None:
    response = http.post(path, json=body)
    assert response.status_code == status
    assert text in str(error(response)["message"])


def test_disconnect_frees_the_slot(server: str, generator: Generator) -> None:
    body = {"messages": MESSAGES, "max_tokens": 400, "ignore_eos": True}
    for stream in (False, True):
        # Not streamed, nothing comes in time; streamed, the reader leaves after the first line.
        request = {"json": body | {"stream": stream}, "timeout": 10 if stream else 0.05}
        left = 0
        # On a busy machine all tokens may be there before the reader has its first line: another attempt then.
        for _ in range(20):
            gone = nullcontext() if stream else pytest.raises(httpx.ReadTimeout)
            with gone, httpx.stream("POST", f"{server}/v1/chat/completions", **request) as response:
                assert next(response.iter_lines())
                left = len(generator.in_flight)
            if left or not stream:
                break
        assert left or not stream
        deadline = time.monotonic() + 5
        while len(generator.in_flight) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(generator.in_flight) == 0


def test_a_full_queue_is_refused(tiny_model: Path) -> None:
    config = ServerConfig(model=str(tiny_model), dtype="float32", threads=1, port=0, max_batch=1, max_queue=1)
    with running_server(config) as url:
        body = {"messages": MESSAGES, "max_tokens": 50, "ignore_eos": True, "n": 3}
        response = httpx.post(f"{url}/v1/chat/completions", json=body)
        assert response.status_code == 503 and "overloaded" in str(error(response)["message"])
        assert httpx.post(f"{url}/v1/chat/completions", json=body | {"n": 2}).status_code == 200


NUMBERS = [
    *("9223372036854775807", "9223372036854775808", "-9223372036854775809", "1" + "0" * 400, "1e999", "-1e999"),
    *("NaN", "Infinity", "-1", "-2", "0", "0.5", "3.0", "2147483647", "2147483648", "1e-300", "true", "null", '"7"'),
    *("[]", "{}", '""'),
]
FIELDS = [
    *("temperature", "top_p", "top_k", "n", "max_tokens", "max_completion_tokens", "seed", "top_logprobs"),
    *("prompt_logprobs", "stop_token_ids", "presence_penalty", "min_p", "repetition_penalty", "logit_bias"),
]


def ask(http: httpx.Client, **fields: object) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 2, **fields}
    return http.post("/v1/chat/completions", content=json.dumps(body))


@pytest.mark.parametrize("field", FIELDS)
def test_a_number_is_served_or_refused_by_its_bounds(http: httpx.Client, field: str) -> None:
    words = "one " * 200  # they leave little of the context to an answer without bounds
    text = f'{{"messages": [{{"role": "user", "content": "{words}"}}], "logprobs": true, "max_tokens": 2, "n": 1, %s}}'
    for value in NUMBERS:
        answer = http.post("/v1/chat/completions", content=text % f'"{field}": {value}')
        assert answer.status_code in (200, 400), (value, answer.text)
    assert ask(http).status_code == 200 and http.get("/health").status_code == 200


def test_a_list_with_a_million_errors_is_one_and_depth_is_bounded(http: httpx.Client) -> None:
    for wrong in ('{"messages": [%s]}', '{"prompt": [%s, "a"]}', '{"prompt": "a", "stop_token_ids": [%s]}'):
        path = "/v1/chat/completions" if "messages" in wrong else "/v1/completions"
        answer = http.post(path, content=wrong % ",".join(["-7"] * 60_000))
        assert answer.status_code == 400 and len(answer.text) < 2000
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 20_000}}
    answer = ask(http, messages=[*MESSAGES, {"role": "assistant", "tool_calls": [call]}])
    assert answer.status_code == 400 and "recursion" in answer.text


TOOLS = [{"type": "function", "function": {"name": "execute_bash", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "f", "arguments": {"x":  1}}</tool_call>'


def test_an_answer_that_is_one_fenced_object_naming_an_offered_tool_is_a_call() -> None:
    """As Qwen2.5-Coder-1.5B-Instruct calls tools."""
    text = '```json\n{\n  "name": "execute_bash",\n  "arguments": {\n    "command": "ls"\n  }\n}\n```\n'
    parsed = parse_tool_calls(text, TOOLS)
    call = ToolCall(name="execute_bash", arguments='{\n    "command": "ls"\n  }')
    assert (parsed.content, parsed.calls) == (None, (call,))
    assert parse_tool_calls(text, ()) == ParsedText(text, (), text)
    malformed = CALL + "<tool_call>oops</tool_call>"
    assert parse_tool_calls(malformed, TOOLS) == ParsedText(malformed, (), malformed)


class Writing:
    """A generator that writes one text, whatever it is asked."""

    def __init__(self, generator: Generator, *pieces: str) -> None:
        self.tokenizer, self.max_model_len = generator.tokenizer, generator.max_model_len
        self._pieces = pieces

    def submit(self, ids: Any, params: Any, *, adapter: Any = None, on_delta: Any = None) -> Future[Generation]:
        made = Generation(tuple(ids), params, self.tokenizer)
        for piece in self._pieces:
            made.sampled.append(ScoredToken(7, -0.5))
            made.text += piece
            if on_delta is not None:
                on_delta(made.sampled[-1], piece)
        made.finish_reason = "stop"
        made.future.set_result(made)
        return made.future


def test_tool_calls_are_parsed_whole_and_streamed(generator: Generator) -> None:
    pieces = ("Let me ", "look.\n", "<tool", CALL.removeprefix("<tool"), " then\n")
    config = ServerConfig(model="tiny", port=0)
    with (
        running_server(config, cast(Generator, Writing(generator, *pieces))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        options: Any = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS}
        (choice,) = client.chat.completions.create(**options).choices
        deltas = [chunk.choices[0] for chunk in client.chat.completions.create(**options, stream=True)]
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("f", '{"x":  1}')
    assert choice.message.content == "Let me look.\n then" and choice.finish_reason == "tool_calls"
    (streamed,) = [call for each in deltas for call in each.delta.tool_calls or ()]
    assert streamed.function.model_dump() == call.function.model_dump() and deltas[-1].finish_reason == "tool_calls"
    assert "".join(each.delta.content or "" for each in deltas) == "Let me look.\n then\n"
