"""The recorder in OpenHands' real ``LLM``, over a real server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from litellm.types.utils import ModelResponse
from openhands.core.config import LLMConfig
from openhands.llm.llm import LLM
from pydantic import SecretStr
from scripted_model import EMPTY, LOGPROB, ScriptedModel, message_ids, prompt_ids, refusal, says, serve

from openhands_rl_plugin.core.messages import NEUTRAL_PARAMETERS
from openhands_rl_plugin.core.records import MISSING
from openhands_rl_plugin.hosts.v0.recorder import CallLog, RecordedCompletion, record_completions, recording

MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedModel]:
    with serve() as model:
        yield model


def llm_for(server: ScriptedModel, model: str, provider: str = "openai", **config) -> LLM:
    settings = {"num_retries": 3, "retry_min_wait": 0, "retry_max_wait": 0, "native_tool_calling": True, **config}
    llm = LLM(
        LLMConfig(model=f"{provider}/{model}", base_url=server.url, api_key=SecretStr("sk-hidden"), **settings),
        service_id="agent",
    )
    record_completions(llm)
    return llm


def ask(llm: LLM, **arguments) -> tuple[object, CallLog]:
    with recording(CallLog(session="s", step=4, base_model="base")) as log:
        response = llm.completion(messages=MESSAGES, **arguments)
    return response, log


def test_no_candidate_is_lost_from_openhands_metrics(server):
    server.policies["many"] = lambda body: says("Hello.")
    llm = llm_for(server, "many")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(16) as pool:
            logs = [log for _, log in pool.map(lambda _: ask(llm), range(64))]
    finally:
        sys.setswitchinterval(interval)
    usages = [log.attempts[0].completion.usage for log in logs if log.attempts[0].completion is not None]
    counted = llm.metrics.accumulated_token_usage
    assert counted.prompt_tokens == sum(usage.prompt_tokens for usage in usages) == 64 * len(prompt_ids(MESSAGES))
    assert counted.completion_tokens == sum(usage.completion_tokens for usage in usages)
    assert len(llm.metrics.response_latencies) == len(llm.metrics.token_usages) == 64


@pytest.mark.shows("every completion with token ids and logprobs")
def test_answer_with_its_tokens_policy_and_parameters(server):
    server.script("shop-v000012", [says("Hello.")])
    response, log = ask(llm_for(server, "base"), model="openai/shop-v000012", temperature=0.25, seed=9, stop=["x"])
    (attempt,) = log.attempts
    completion = attempt.completion
    assert completion is not None and completion.tokens is not None and completion.policy is not None
    assert completion.message.content == "Hello."
    assert list(completion.tokens.prompt_ids) == prompt_ids(MESSAGES)
    assert list(completion.tokens.sampled_ids) == message_ids(says("Hello."))
    assert completion.tokens.logprobs == (LOGPROB,) * len(completion.tokens.sampled_ids)
    assert completion.policy.model_dump() == {"base_model": "base", "adapter": "shop", "version": 12}
    assert completion.usage.cached_tokens == 7
    asked = {"temperature": 0.25, "top_p": 1.0, "seed": 9, "stop": ["x"]}
    assert attempt.parameters == {**asked, **NEUTRAL_PARAMETERS}
    assert completion.sampling is not None and completion.sampling.top_k == -1
    assert list(attempt.messages) == MESSAGES
    assert "sk-hidden" not in repr(log)
    # The host gets the answer without the arrays that it would copy into every event.
    assert response.choices[0].message.content == "Hello."
    assert not hasattr(response, "prompt_token_ids")
    assert completion.metadata["response"]["choices"][0]["logprobs"] is None


def test_the_tokens_are_the_same_where_litellm_reads_the_answer(server):
    server.policies["shop-v000001"] = lambda body: says("Hello.")
    keyless = LLMConfig(model="hosted_vllm/shop-v000001", base_url=server.url, num_retries=1, native_tool_calling=True)
    llm = LLM(keyless, service_id="agent")
    record_completions(llm)
    _, by_litellm = ask(llm)
    _, by_tap = ask(llm_for(server, "shop-v000001"))
    one, other = by_litellm.attempts[0].completion, by_tap.attempts[0].completion
    assert one is not None and other is not None and one.tokens is not None
    assert (one.tokens, one.message, one.usage) == (other.tokens, other.message, other.usage)
    # litellm's reading of the answer and the answer itself.
    for response in (one.metadata["response"], other.metadata["response"]):
        assert response["choices"][0]["message"]["content"] == "Hello."
        assert response["usage"]["prompt_tokens"] == len(prompt_ids(MESSAGES))
        assert response["choices"][0]["logprobs"] is None and "token_ids" not in response["choices"][0]


def test_of_a_prompt_that_goes_on_only_what_is_new_is_kept(server):
    server.policies["on"] = lambda body: says("Hello.")
    llm = llm_for(server, "on")
    _, log = ask(llm)
    first = log.attempts[0].completion.tokens
    longer = [*MESSAGES, says("Hello."), {"role": "user", "content": "And now?"}]
    for after, extends in ((first, True), (None, False), (first.model_copy(), False)):
        with recording(CallLog(session="s", step=5, base_model="base", after=after)) as log:
            llm.completion(messages=longer)
        tokens = log.attempts[0].completion.tokens
        context = (*first.prompt_ids, *first.sampled_ids) if extends else ()
        assert tokens.extends is extends
        assert [*context, *tokens.prompt_ids] == prompt_ids(longer)
    # A prompt that does not go on from it is whole.
    with recording(CallLog(session="s", step=6, base_model="base", after=first)) as log:
        llm.completion(messages=longer[1:])
    tokens = log.attempts[0].completion.tokens
    assert not tokens.extends and list(tokens.prompt_ids) == prompt_ids(longer[1:])


def test_every_attempt_with_the_temperature_it_really_had(server):
    server.script("silent", [EMPTY, says("At last.")])
    _, log = ask(llm_for(server, "silent", temperature=0.0))
    assert [attempt.error for attempt in log.attempts] == ["the server answered without a choice", None]
    # OpenHands raises the temperature of the retry by itself.
    assert [attempt.parameters["temperature"] for attempt in log.attempts] == [0.0, 1.0]


def test_what_the_user_set_himself_is_kept(server):
    server.script("frugal", [says("Hello.")])
    own = {"logprobs": False, "extra_body": {"return_token_ids": False, "top_k": 5}}
    _, log = ask(llm_for(server, "frugal", completion_kwargs=own))
    (request,) = server.requests["frugal"]
    assert (request["logprobs"], request["return_token_ids"], request["top_k"]) == (False, False, 5)
    assert log.attempts[0].completion is not None and log.attempts[0].completion.tokens is None
    assert log.attempts[0].parameters["top_k"] == 5
    # The neutral values fill in what he left open.
    assert (request["repetition_penalty"], request["min_p"]) == (1.0, 0.0)
    assert log.attempts[0].completion.sampling.top_k == 5


def test_vendors_are_not_asked_for_what_they_refuse(server):
    server.script("vendor", [says("Hello.")])
    _, log = ask(llm_for(server, "vendor", provider="mistral"))
    (request,) = server.requests["vendor"]
    assert "return_token_ids" not in request and "logprobs" not in request
    assert log.attempts[0].completion is not None and log.attempts[0].completion.tokens is None


@pytest.mark.parametrize("status", [400, 403, 422])
def test_a_strict_vendor_gets_the_request_again_without_what_it_refuses(server, status):
    def strict(body):
        refused = "return_token_ids" in body
        return refusal(status, "property 'return_token_ids' is unsupported") if refused else says("Hello.")

    name = f"strict-{status}"
    server.policies[name] = strict
    _, log = ask(llm_for(server, name))
    refused, answered = log.attempts
    assert refused.completion is None and "unsupported" in str(refused.error)
    assert answered.completion is not None and answered.completion.message.content == "Hello."
    told = 400 if status == 422 else status  # litellm has no 422
    why = f"the model server refuses return_token_ids with status {told}"
    assert answered.completion.metadata[MISSING] == {"token_ids": why}
    # What it refuses is known to the other agents of the process.
    _, log = ask(llm_for(server, name))
    assert [attempt.error for attempt in log.attempts] == [None]
    assert ["return_token_ids" in body for body in server.requests[name]] == [True, False, False]


def test_half_a_surrogate_pair_is_replaced_for_the_host_too():
    said = ModelResponse(choices=[{"message": {"role": "assistant", "content": "half \ud83d"}}])
    with recording(CallLog(session="s", step=4, base_model="base")) as log:
        response = RecordedCompletion(lambda **asked: said)(model="openai/m", messages=MESSAGES)
    completion = log.attempts[0].completion
    assert completion is not None and completion.message.content == "half \ufffd"
    assert response.choices[0].message.content == "half \ufffd"
    completion.model_dump_json().encode()
