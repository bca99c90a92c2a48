"""The model of a conversation as an ``LLMEngine``: the SDK's own LLM, or an engine of the project."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from litellm.types.utils import Choices, ModelResponse
from openai import OpenAIError
from openhands.sdk.llm import LLM, LLMResponse
from openhands.sdk.llm import Message as SdkMessage
from openhands.sdk.llm.exceptions import LLMError
from openhands.sdk.tool import ToolDefinition

from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.errors import ModelError, describe
from openhands_rl_plugin.core.messages import NEUTRAL_PARAMETERS, WireMessage, altering_parameters, whole_json
from openhands_rl_plugin.core.protocols import LLMEngine
from openhands_rl_plugin.core.records import MISSING
from openhands_rl_plugin.core.types import Completion, JsonObject, Message, PolicyRef, SamplingParams
from openhands_rl_plugin.hosts.shared.litellm_calls import (
    asks_for_tokens,
    model_server_error,
    split_provider,
    take_message,
    take_tokens,
    usage_of,
    wanted_fields,
)
from openhands_rl_plugin.hosts.v1.values import has_images, response_of, sdk_message, show_tokens, with_calls_of
from openhands_rl_plugin.hosts.v1.written_prompts import TextExchange, TextLLM, WrittenLLM, WrittenTool, is_text
from openhands_rl_plugin.models.engines.extensions import (
    SAMPLING,
    TOKEN_IDS,
    ExtensionAttempt,
    extension_values,
    missing_parts,
    sampling_as_sent,
)
from openhands_rl_plugin.models.engines.seeded import ConversationSeeds
from openhands_rl_plugin.session.sampled_texts import SampledTexts
from openhands_rl_plugin.session.session import Session
from openhands_rl_plugin.session.turns import TurnAnswers
from openhands_rl_plugin.session.upstream import extensions_of

LLM_ERRORS = (OpenAIError, LLMError)
"""What the SDK's LLM raises when it gets no answer, or one that it cannot read."""


@dataclass(frozen=True)
class ConversationTurn:
    """The request that the agent would send now.

    ``path`` is the conversation in the tree, as the strategy sees it; ``prompt`` the same as the agent passes it to its
    LLM, and ``written`` as that sends it, where it is known. ``tools`` and their ``offered`` form, and the other
    ``arguments`` that the agent gives. ``rewritten``: the prompt does not extend
    the conversation so far.
    """

    llm: LLM
    path: tuple[Message, ...] = ()
    prompt: Sequence[SdkMessage] = ()
    written: Sequence[WireMessage] | None = None
    tools: Sequence[ToolDefinition] = ()
    offered: Sequence[JsonObject] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    rewritten: bool = False

    def after(self, messages: Sequence[Message]) -> list[SdkMessage]:
        """The prompt of a conversation that goes on from here: ``messages`` are the whole of it."""
        return [*self.prompt, *(sdk_message(message) for message in messages[len(self.path) :])]


@dataclass(frozen=True)
class _Call:
    """One completion of the SDK's LLM. ``number`` counts the calls of the episode; ``path`` is the prompt as the
    strategy sees it."""

    llm: LLM
    prompt: Sequence[SdkMessage]
    written: Sequence[WireMessage] | None
    turn: ConversationTurn | None
    sampling: SamplingParams
    number: int
    path: tuple[Message, ...] = ()


class ConversationEngine:
    """An ``LLMEngine`` for the turns of one conversation. ``own`` samples in the place of the SDK's LLM, if given.

    ``answers`` has the SDK's response for each answer, ``said`` what was sampled, where calls are text; ``exact``: that
    is what the model is shown. ``compact``: whether the prompt is the compact one.
    """

    def __init__(self, episode: Session, own: LLMEngine | None = None, *, exact: bool = True) -> None:
        self._exact = exact
        self._episode = episode
        self.compact = episode.settings.workspace.is_compact
        self._own = own
        self._numbers = itertools.count()
        self._seeds = ConversationSeeds()
        self.answers = TurnAnswers[ConversationTurn, LLMResponse](episode)
        self.said = SampledTexts()
        self._turn: ConversationTurn | None = None
        self._counting = threading.Lock()
        self._under_way = 0

    @property
    def episode_seed(self) -> int | None:
        """The request's seed, which a search combines with its own."""
        return self._episode.request.seed

    def open(self, turn: ConversationTurn) -> None:
        """As ``TurnAnswers.open``."""
        self._turn = turn
        self.answers.open(turn)

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """Sample ``n`` answers concurrently. A conversation that extends the agent's is sent in the agent's form.

        Returns fewer when some calls fail. Raises ``InfrastructureError`` or ``ModelError``, with the SDK's own
        exception as the cause, when all fail. Meanwhile the episode so far is stored; raises ``StorageError``.
        """
        known, current = self.answers.turn(messages), self._turn
        assert current is not None
        prompt = known.after(messages) if known else [sdk_message(message) for message in messages]
        written = known.written if known and len(messages) == len(known.path) else None
        llm = (known or current).llm
        # Tools that are described in the prompt are none of the strategy's.
        offering = known if tools or (known is not None and is_text(llm, known.offered)) else None
        own = self._own if llm.native_tool_calling and not has_images(prompt) else None
        calls = []
        for _ in range(n):
            wanted = self._episode.sampling_for(sampling, self._seeds.next(messages))
            call = _Call(llm, prompt, written, offering, wanted, next(self._numbers), tuple(messages))
            if own is None:
                calls.append(background().blocking(partial(self._ask_llm, call)))
            else:
                calls.append(self._ask_own(own, messages, call))
        return await self.answers.gather(calls)

    async def _ask_own(self, own: LLMEngine, messages: Sequence[Message], call: _Call) -> Completion:
        offered = call.turn.offered if call.turn else ()
        started = time.perf_counter()
        # With calls that the SDK corrected: servers refuse a conversation with arguments that are no JSON.
        sent = with_calls_of(messages, call.prompt)
        [completion] = await own.complete(sent, tools=offered, n=1, sampling=call.sampling)
        with self._counting:
            response = response_of(completion, call.llm)
        return self._answered(call, completion, response, time.perf_counter() - started)

    def aside(self, llm: LLM, prompt: Sequence[SdkMessage], arguments: Mapping[str, Any]) -> Completion:
        """A completion beside the turns, such as a summary, sampled as ``llm`` is set. Blocks; raises as above."""
        own = SamplingParams(
            temperature=llm.temperature, top_p=llm.top_p, max_tokens=llm.max_output_tokens, seed=llm.seed
        )
        turn = ConversationTurn(llm, prompt=prompt, arguments=arguments)
        return self._ask_llm(_Call(llm, prompt, None, turn, own, next(self._numbers)))

    def _ask_llm(self, call: _Call) -> Completion:
        """One completion through litellm, with the fields that the server accepts."""
        sampled = self._served(call.llm)
        route = {"model": sampled.model, "base_url": sampled.base_url, "extra_body": call.llm.litellm_extra_body}
        wanted = wanted_fields(route) if self._episode.token_ids else ()
        asking = extensions_of(str(sampled.base_url or "")).attempt(sampled.model, wanted)
        while True:
            started = time.perf_counter()
            try:
                exchange = TextExchange(self.compact, partial(self.said.put_back, path=call.path))
                response = self._send(call, sampled, asking, exchange)
            except LLM_ERRORS as error:
                if _is_refused(asking, error):
                    continue
                self._note_failed(call, error, time.perf_counter() - started)
                refused = model_server_error(_with_status(error))
                raise refused from error
            asking.succeeded()
            completion = self._read(call, response, asking, exchange.answer)
            if self._exact and exchange.answer is not None:
                self.said.add(call.path, completion)
            asked_for = self._episode.token_ids and asks_for_tokens(route)
            if asked_for and (missing := missing_parts(asking, completion.tokens)):
                completion.metadata[MISSING] = missing
            return self._answered(call, completion, response, time.perf_counter() - started)

    def _served(self, llm: LLM) -> LLM:
        """The LLM, with the adapter that the request names."""
        served = self._episode.request.served_model
        if served is None:
            return llm
        provider, _ = split_provider(llm.model)
        return llm.model_copy(update={"model": f"{provider}/{served}" if provider else served})

    def _send(self, call: _Call, llm: LLM, asking: ExtensionAttempt, exchange: TextExchange) -> LLMResponse:
        wanted = call.sampling
        given = {name: getattr(wanted, name) for name in NEUTRAL_PARAMETERS}
        left_out = _left_out_by_sdk(wanted, llm, asking)
        own = {**left_out, **altering_parameters(given), **(call.llm.litellm_extra_body or {})}
        body = {**extension_values(asking.fields, own), **own}
        lengths = [length for length in (wanted.max_tokens, call.llm.max_output_tokens) if length is not None]
        settings = {
            "temperature": wanted.temperature,
            "top_p": wanted.top_p,
            "seed": wanted.seed,
            "max_output_tokens": min(lengths, default=None),
            "stream": False,
        }
        asked = llm.model_copy(update={**settings, "litellm_extra_body": body} if body else settings)
        # Another class of LLM, or another model, may write the prompt in another form.
        written = call.written if type(llm) is LLM and llm.model == call.llm.model else None
        tools = _tools_of(call.turn, self.compact) if call.turn else None
        if is_text(llm, tools or ()):
            asked = TextLLM.exchanging(asked, written, exchange)
        elif written is not None:
            asked = WrittenLLM.over(asked, written)
        arguments = dict(call.turn.arguments) if call.turn else {}
        if wanted.stop:
            arguments["stop"] = list(wanted.stop)
        with self._counting:
            self._under_way += 1
            alone = self._under_way == 1
        try:
            if alone:
                return asked.completion(list(call.prompt), tools, **arguments)
            return self._send_beside_others(call, asked, tools, arguments)
        finally:
            with self._counting:
                self._under_way -= 1

    def _send_beside_others(
        self, call: _Call, asked: LLM, tools: list[Any] | None, arguments: Mapping[str, Any]
    ) -> LLMResponse:
        """With metrics of its own, which are added up: the SDK keeps the request under way in the LLM's telemetry."""
        shared = call.llm.telemetry
        asked.reset_metrics()
        # Old releases make it when it is asked for, and their ``completion`` does not ask.
        assert asked.telemetry is not None
        # An agent server hears of completions by these, and nothing public returns them.
        asked.telemetry.set_log_completions_callback(getattr(shared, "_log_completions_callback", None))
        response = asked.completion(list(call.prompt), tools, **arguments)
        with self._counting:
            call.llm.metrics.merge(asked.metrics)
            if (updated := getattr(shared, "_stats_update_callback", None)) is not None:
                updated()
            return response.model_copy(update={"metrics": call.llm.metrics.get_snapshot()})

    def _read(self, call: _Call, response: LLMResponse, asking: ExtensionAttempt, text: Choices | None) -> Completion:
        """``text``: the choice before the SDK read its call, where that was text."""
        raw = response.raw_response
        choice = raw.choices[0] if isinstance(raw, ModelResponse) else None
        if not isinstance(raw, ModelResponse) or not isinstance(choice, Choices):
            raise ModelError("the model server answered without a choice")
        tokens = take_tokens((raw.model_extra or {}).pop("prompt_token_ids", None), choice)
        # Of both: what the SDK goes on with is made fit to be sent, too.
        message = take_message(choice)
        if text is not None:
            message = take_message(text)
        rest = raw.model_dump(mode="json", warnings=False)
        if call.llm.litellm_extra_body.get(TOKEN_IDS):
            show_tokens(raw, choice, tokens)
        return Completion.model_construct(
            message=message,
            tokens=tokens,
            finish_reason=choice.finish_reason,
            usage=usage_of(raw),
            policy=PolicyRef.from_served_name(self._episode.base_model, split_provider(raw.model or call.llm.model)[1]),
            sampling=sampling_as_sent(call.sampling, asking),
            metadata={"response": whole_json(rest)},
        )

    def _answered(self, call: _Call, completion: Completion, response: LLMResponse, latency: float) -> Completion:
        self.answers.keep(completion.message, response)
        metadata: JsonObject = {
            "call": call.number,
            "response_id": response.id,
            "latency": latency,
            **completion.metadata,
        }
        if call.turn is not None and call.turn.rewritten:
            metadata["history_rewritten"] = True
        return completion.model_copy(update={"metadata": metadata})

    def _note_failed(self, call: _Call, error: Exception, latency: float) -> None:
        """Record a call without an answer, in the metadata of the prompt's last node."""
        tree = self._episode.tree
        if tree.head is not None:
            metadata = tree.nodes[tree.head].metadata
            earlier = metadata.get("failed_attempts")
            assert earlier is None or isinstance(earlier, list)
            failed: JsonObject = {"model": call.llm.model, "latency": latency, "error": describe(error)}
            metadata["failed_attempts"] = [*(earlier or ()), failed]


def _tools_of(turn: ConversationTurn, compact: bool) -> list[Any] | None:
    # A log of completions shows the tools' own fields, which are not what is sent of compact ones.
    if (turn.llm.log_completions and not compact) or len(turn.offered) != len(turn.tools):
        return list(turn.tools) or None
    written = zip(turn.tools, turn.offered, strict=True)
    return [WrittenTool(tool, offered, turn.arguments) for tool, offered in written] or None


def _with_status(error: Exception) -> Exception:
    """The first of the errors behind an error of the SDK that has an HTTP status, else the error itself."""
    below: BaseException | None = error
    while below is not None and not isinstance(getattr(below, "status_code", None), int):
        below = below.__cause__
    return below if isinstance(below, Exception) else error


def _left_out_by_sdk(wanted: SamplingParams, llm: LLM, asking: ExtensionAttempt) -> dict[str, float]:
    """Sampling parameters that newer releases send to no model that they do not know, as if it were a vendor's for
    reasoning. For servers of a user's own only; neutral ones unless they are refused."""
    if not wanted_fields({"model": llm.model, "base_url": llm.base_url}):
        return {}
    values = {"temperature": wanted.temperature, "top_p": wanted.top_p}
    neutral = SAMPLING in asking.fields
    return {name: value for name, value in values.items() if value is not None and (value != 1 or neutral)}


def _is_refused(asking: ExtensionAttempt, error: Exception) -> bool:
    """Whether to send the request again with the fields that are left."""
    cause = _with_status(error)
    status = getattr(cause, "status_code", None)
    return isinstance(status, int) and asking.is_refused(status, str(cause).encode())
