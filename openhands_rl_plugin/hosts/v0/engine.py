"""An ``LLMEngine`` over the OpenHands ``LLM`` of a session's agent.

OpenHands' own text of the tools, for a model without tool calling, takes 2,000 tokens, and goes with the tools of a
call. With the compact prompt the call is made without tools: its messages are converted here before, and the answer
after, by OpenHands' own functions.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from litellm import Message as LiteLLMMessage
from litellm.types.utils import Choices, ModelResponse
from openai import OpenAIError
from openhands.core.config import LLMConfig
from openhands.core.exceptions import (
    FunctionCallConversionError,
    FunctionCallNotExistsError,
    FunctionCallValidationError,
    LLMMalformedActionError,
    LLMNoActionError,
    LLMNoResponseError,
    LLMResponseError,
)
from openhands.events.action import Action
from openhands.llm.fn_call_converter import (
    STOP_WORDS,
    convert_fncall_messages_to_non_fncall_messages,
    convert_non_fncall_messages_to_fncall_messages,
)
from openhands.llm.llm import LLM
from openhands.llm.model_features import get_features

from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.errors import ModelError, describe
from openhands_rl_plugin.core.messages import NEUTRAL_PARAMETERS, WireMessage, altering_parameters, to_wire
from openhands_rl_plugin.core.types import Completion, JsonObject, Message, SamplingParams, Tokens
from openhands_rl_plugin.hosts.compact_prompt import described
from openhands_rl_plugin.hosts.sampled_texts import SampledTexts
from openhands_rl_plugin.hosts.shared.episode import HostEpisode
from openhands_rl_plugin.hosts.shared.litellm_calls import TurnAnswers, model_server_error, split_provider
from openhands_rl_plugin.hosts.v0.recorder import CallLog, record_completions, recording
from openhands_rl_plugin.models.engines.seeded import ConversationSeeds

ReadActions = Callable[[ModelResponse], Sequence[Action]]

MALFORMED = (
    FunctionCallConversionError,
    FunctionCallNotExistsError,
    FunctionCallValidationError,
    LLMMalformedActionError,
    LLMNoActionError,
    LLMResponseError,
)
"""What OpenHands raises for an answer of the model that it cannot parse."""


@dataclass(frozen=True)
class HostTurn:
    """The request that OpenHands would send now.

    ``path`` is the conversation in the tree, as the strategy sees it. ``prompt`` is the same as OpenHands passes it to
    its LLM, and ``wire`` as the LLM writes it: they differ where tools are described in the prompt. ``rewritten``: it
    does not extend the conversation so far. ``model_metadata`` is what OpenHands sends to a litellm proxy.
    """

    session: str
    step: int
    path: tuple[Message, ...] = ()
    prompt: Sequence[WireMessage] = ()
    wire: Sequence[WireMessage] = ()
    tools: Sequence[JsonObject] = ()
    rewritten: bool = False
    model_metadata: JsonObject = field(default_factory=dict)


@dataclass(frozen=True)
class HostOutcome:
    """The result of parsing an answer: actions, or the error that OpenHands reports to the model."""

    actions: tuple[Action, ...] = ()
    error: Exception | None = None

    def fresh_actions(self) -> list[Action]:
        """Copies to execute: an event stream modifies its actions, and search executes the same one several times."""
        return [copy.copy(action) for action in self.actions]


class ControllerEngine:
    """An ``LLMEngine`` whose completions go through OpenHands' ``LLM``: its retries, metrics and tool formats.

    Every completion is recorded, including answers that OpenHands cannot parse: ``answers`` has their outcomes.
    """

    def __init__(
        self, llm: LLM, episode: HostEpisode, read_actions: ReadActions | None = None, *, compact: bool = False
    ) -> None:
        """``compact``: tools are described in the prompt by our own text, not by OpenHands'."""
        self._llm = llm
        self._compact = compact
        self._episode = episode
        self._read_actions = read_actions
        self._calls = itertools.count()
        self._seeds = ConversationSeeds()
        self._turn = HostTurn(session="", step=0)
        self.answers = TurnAnswers[HostTurn, HostOutcome](episode)
        self.said = SampledTexts()
        record_completions(llm)

    @property
    def episode_seed(self) -> int | None:
        """The request's seed, which a search combines with its own."""
        return self._episode.request.seed

    def open(self, turn: HostTurn) -> None:
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
        """Sample ``n`` answers concurrently. A conversation that extends the host's is sent in the host's form.

        Returns fewer when some calls fail. Raises ``InfrastructureError`` or ``ModelError``, with OpenHands' own
        exception as the cause, when all fail. Meanwhile the episode so far is stored; raises ``StorageError``.
        """
        known = self.answers.turn(messages)
        turn = known or replace(self._turn, path=(), prompt=(), wire=())
        prompt = [*turn.prompt, *(to_wire(message) for message in messages[len(turn.path) :])]
        described_in_prompt = known is not None and not self._llm.is_function_calling_active()
        offered = turn.tools if tools or described_in_prompt else ()
        after = self._tokens_before(messages)
        path = tuple(messages) if described_in_prompt else None
        calls = (
            background().blocking(partial(self._ask, turn, call, prompt, offered, seeded, after, path))
            for call, seeded in [(next(self._calls), self._seeded(sampling, messages)) for _ in range(n)]
        )
        return await self.answers.gather(calls)

    def _seeded(self, sampling: SamplingParams | None, messages: Sequence[Message]) -> SamplingParams:
        return self._episode.sampling_for(sampling, self._seeds.next(messages))

    def _tokens_before(self, messages: Sequence[Message]) -> Tokens | None:
        """The tokens of the last answer in ``messages``, when they are the path to the tree's head."""
        tree = self._episode.tree
        return tree.tokens_before(tree.head) if tuple(messages) == tree.messages() else None

    def _ask(
        self,
        turn: HostTurn,
        call: int,
        prompt: Sequence[WireMessage],
        tools: Sequence[JsonObject],
        sampling: SamplingParams,
        after: Tokens | None,
        path: tuple[Message, ...] | None,
    ) -> Completion:
        # Copies, because litellm may modify its arguments and several calls share the prompt.
        arguments = self._arguments([dict(message) for message in prompt], tools, sampling)
        episode = self._episode
        restore = partial(self.said.put_back, path=path) if path is not None else None
        log = CallLog(
            turn.session,
            turn.step,
            episode.base_model,
            ask_tokens=episode.token_ids,
            after=after,
            altering=altering_parameters({name: getattr(sampling, name) for name in NEUTRAL_PARAMETERS}),
            restore=restore,
        )
        described = self._compact and not self._llm.is_function_calling_active()
        with recording(log):
            outcome = self._outcome(arguments, log, tools if described else ())
        attempt = log.attempts[-1]
        if (completion := attempt.completion) is None:
            raise ModelError("OpenHands cannot parse the model's answer") from outcome.error
        self.answers.keep(completion.message, outcome)
        if path is not None:
            self.said.add(path, completion)
        metadata: JsonObject = {
            "session": turn.session,
            "step": turn.step,
            "call": call,
            "attempts": [attempt.summary() for attempt in log.attempts],
            **completion.metadata,
        }
        if turn.rewritten:
            metadata["history_rewritten"] = True
        if outcome.error is not None:
            metadata["malformed"] = describe(outcome.error)
        expected = restore(turn.wire) if restore is not None else list(turn.wire)
        if len(prompt) == len(expected) and list(attempt.messages) != expected:
            metadata["wire_messages"] = [dict(message) for message in attempt.messages]
        return completion.model_copy(update={"metadata": metadata})

    def _outcome(self, arguments: dict[str, Any], log: CallLog, described: Sequence[JsonObject]) -> HostOutcome:
        try:
            if described:
                describe_in_prompt(arguments, self._llm.config)
            response = self._llm.completion(**arguments)
            if described:
                read_described_call(response, described)
            return HostOutcome(actions=tuple(self._read_actions(response)) if self._read_actions else ())
        except MALFORMED as error:
            if not log.attempts:
                raise ModelError(f"OpenHands cannot format the prompt: {describe(error)}") from error
            return HostOutcome(error=error)
        except (OpenAIError, LLMNoResponseError) as error:
            self._note_failed(log)
            raise model_server_error(error) from error

    def _arguments(
        self, prompt: list[dict[str, Any]], tools: Sequence[JsonObject], wanted: SamplingParams
    ) -> dict[str, Any]:
        config, request = self._llm.config, self._episode.request
        longest = min(filter(None, (wanted.max_tokens, config.max_output_tokens)))
        arguments: dict[str, Any] = {
            "messages": prompt,
            # Always set: OpenHands' retry of an empty answer changes the temperature of a call that does not set one.
            "temperature": wanted.temperature,
            "top_p": wanted.top_p,
            "seed": wanted.seed,
            "max_completion_tokens": longest,
            "extra_body": {"metadata": self._turn.model_metadata},
        }
        if wanted.stop:
            arguments["stop"] = list(wanted.stop)
        if tools:
            arguments["tools"] = list(tools)
        if request.served_model is not None:
            provider, _ = split_provider(config.model)
            arguments["model"] = f"{provider}/{request.served_model}" if provider else request.served_model
        return arguments

    def _note_failed(self, log: CallLog) -> None:
        """Record the attempts of a call without a completion, in the metadata of the prompt's last node."""
        tree = self._episode.tree
        if tree.head is not None:
            metadata = tree.nodes[tree.head].metadata
            earlier = metadata.get("failed_attempts")
            assert earlier is None or isinstance(earlier, list)
            metadata["failed_attempts"] = [*(earlier or ()), *(attempt.summary() for attempt in log.attempts)]


def described_tools(prompt: Sequence[WireMessage], tools: Sequence[Any]) -> list[Any]:
    """The prompt as it is sent. Raises OpenHands' ``FunctionCallConversionError``."""
    system = [message for message in prompt if message["role"] == "system"]
    rest: list[Any] = [message for message in prompt if message["role"] != "system"]
    # Without tools it adds no text to the conversation.
    converted = convert_fncall_messages_to_non_fncall_messages(rest, [], add_in_context_learning_example=False)
    return described([*system, *converted], tools)


def describe_in_prompt(arguments: dict[str, Any], config: LLMConfig) -> None:
    """Change the arguments of a completion to one without tools."""
    arguments["messages"] = described_tools(arguments["messages"], arguments.pop("tools"))
    if get_features(config.model).supports_stop_words and not config.disable_stop_word:
        arguments["stop"] = STOP_WORDS


def read_described_call(response: ModelResponse, tools: Sequence[Any]) -> None:
    """Put the call that the answer's text holds in its place. Raises OpenHands' errors of a call that is wrong."""
    choice = response.choices[0] if response.choices else None
    if isinstance(choice, Choices):
        [answer] = convert_non_fncall_messages_to_fncall_messages([choice.message.model_dump()], list(tools))
        choice.message = LiteLLMMessage(**answer)
