"""The completions of OpenHands' LLMs, asked of a session by a direct call in the place of litellm's.

It takes the place of ``LLM._completion_unwrapped``, below retries, message formatting and the conversion of tools to a
prompt, and before the answer is parsed. An error of the model server is raised as litellm's exception, so that
OpenHands' own retries and messages work as before. What condensers and other agents ask is recorded, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from litellm import Message as LiteLLMMessage
from litellm.exceptions import ContextWindowExceededError
from litellm.types.utils import Choices, ModelResponse
from openhands.controller.agent import Agent
from openhands.controller.state.state import State
from openhands.core import exceptions
from openhands.core.config import AgentConfig
from openhands.core.message import Message, TextContent
from openhands.events.action import Action, AgentFinishAction
from openhands.events.observation import Observation
from openhands.events.observation.agent import RecallObservation
from openhands.llm.fn_call_converter import (
    STOP_WORDS,
    convert_fncall_messages_to_non_fncall_messages,
    convert_non_fncall_messages_to_fncall_messages,
)
from openhands.llm.llm import LLM
from openhands.llm.model_features import get_features
from openhands.memory.condenser.condenser import Condenser
from openhands.memory.condenser.impl.pipeline import CondenserPipeline
from openhands.memory.conversation_memory import ConversationMemory
from openhands.utils.prompt import PromptManager

from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.errors import describe
from openhands_rl_plugin.core.messages import WireMessage
from openhands_rl_plugin.core.types import CONDENSATION, StopReason
from openhands_rl_plugin.hosts.compact_prompt import described
from openhands_rl_plugin.hosts.shared.litellm_calls import answered, malformed, upstream_of
from openhands_rl_plugin.session.branches import Complete
from openhands_rl_plugin.session.session import Session
from openhands_rl_plugin.session.upstream import Upstream

MALFORMED = malformed(exceptions)
"""What OpenHands raises for an answer of the model that it cannot parse."""

ANSWERED = MALFORMED[1:]
"""Errors of an answer that OpenHands' controller reports to the model; others end the session."""


def connect(session: Session, llm: LLM) -> None:
    """Let the session sample from the model of ``llm``."""
    session.connect(_upstream(llm))


def ask(llm: LLM, complete: Complete) -> None:
    """Let ``complete`` answer the requests of ``llm``."""
    holder: Any = llm
    given: dict[str, Any] = _send_of(llm).keywords

    def answer(**more: Any) -> ModelResponse:
        return answered(complete, {**given, **more})

    answer.send = _send_of(llm)  # type: ignore[attr-defined]
    holder._completion_unwrapped = answer


def twin(llm: LLM) -> LLM:
    """An LLM with the same settings and metrics of its own, which does not try again."""
    config = llm.config.model_copy(update={"num_retries": 1, "log_completions": False})
    return LLM(config, service_id=llm.service_id)


def _send_of(llm: LLM) -> Any:
    """litellm's ``completion`` as OpenHands bound it."""
    holder: Any = llm._completion_unwrapped
    return getattr(holder, "send", holder)


def _upstream(llm: LLM) -> Upstream:
    send = _send_of(llm)
    return upstream_of(send.keywords, send)


def describe_tools(llm: LLM) -> None:
    """Let ``llm`` describe tools in the prompt by our own text, which is shorter than OpenHands'."""
    holder: Any = llm
    if not isinstance(llm.completion, partial):
        holder._completion = partial(_completed_by_text, llm, llm.completion)


def _completed_by_text(
    llm: LLM, complete: Callable[..., ModelResponse], *, messages: Any, tools: Sequence[Any], **more: Any
) -> ModelResponse:
    sent = described_tools(llm.format_messages_for_llm(messages), tools)
    if get_features(llm.config.model).supports_stop_words and not llm.config.disable_stop_word:
        more["stop"] = STOP_WORDS
    response = complete(messages=sent, **more)
    read_described_call(response, tools)
    return response


def described_tools(prompt: Sequence[WireMessage], tools: Sequence[Any]) -> list[Any]:
    """The prompt as it is sent. Raises OpenHands' ``FunctionCallConversionError``."""
    rest: list[Any] = [message for message in prompt if message["role"] != "system"]
    # Without tools it adds no text to the conversation.
    converted = convert_fncall_messages_to_non_fncall_messages(rest, [], add_in_context_learning_example=False)
    return described(prompt, converted, tools)


def read_described_call(response: ModelResponse, tools: Sequence[Any]) -> None:
    """Put the call that the answer's text holds in its place. Raises OpenHands' errors of a call that is wrong."""
    choice = response.choices[0] if response.choices else None
    if isinstance(choice, Choices):
        [answer] = convert_non_fncall_messages_to_fncall_messages([choice.message.model_dump()], list(tools))
        choice.message = LiteLLMMessage(**answer)


def record_condenser(condenser: Condenser, session: Session) -> None:
    """Record what a condenser asks its model, as nodes of their own kind beside the episode."""
    for llm in _models(condenser):
        upstream = _upstream(llm)
        ask(llm, lambda body, to=upstream: background().wait_for(session.aside(body, CONDENSATION, to)))


def _models(condenser: Condenser) -> Iterator[LLM]:
    if isinstance(condenser, CondenserPipeline):
        for each in condenser.condensers:
            yield from _models(each)
    elif isinstance(llm := getattr(condenser, "llm", None), LLM):
        yield llm


_CONTEXT = """\
{% if repository_info -%}
The repository {{ repository_info.repo_name }} is in {{ repository_info.repo_directory }}
{%- if repository_info.branch_name %}, on branch {{ repository_info.branch_name }}{% endif %}.
{% endif -%}
{% if repository_instructions -%}
{{ repository_instructions }}
{% endif -%}
{% if runtime_info -%}
{% if runtime_info.working_dir not in ("", "/workspace") -%}
The folder is {{ runtime_info.working_dir }}.
{% endif -%}
{% for host, port in (runtime_info.available_hosts or {}).items() -%}
A web server may use port {{ port }}, which the user reaches as {{ host }}.
{% endfor -%}
{% if runtime_info.additional_agent_instructions -%}
{{ runtime_info.additional_agent_instructions }}
{% endif -%}
{% for name, description in (runtime_info.custom_secrets_descriptions or {}).items() -%}
The environment variable {{ name }} is set{% if description %}: {{ description }}{% else %}.{% endif %}
{% endfor -%}
{% endif -%}
{% if conversation_instructions and conversation_instructions.content -%}
{{ conversation_instructions.content }}
{% endif %}"""


class CompactMemory(ConversationMemory):
    """OpenHands' conversation with these texts, and no message where nothing is told."""

    def __init__(self, config: AgentConfig, prompts: PromptManager) -> None:
        prompts.additional_info_template = prompts.env.from_string(_CONTEXT)
        super().__init__(config, prompts)

    def _process_observation(self, obs: Observation, *args: Any, **rest: Any) -> list[Message]:
        messages = super()._process_observation(obs, *args, **rest)
        if not isinstance(obs, RecallObservation):
            return messages
        for message in messages:
            message.content = [each for each in message.content if not _is_empty(each)]
        return [message for message in messages if message.content]


def _is_empty(content: object) -> bool:
    return isinstance(content, TextContent) and not content.text.strip()


@contextmanager
def noted_step(session: Session, state: State) -> Iterator[None]:
    """One step of an agent: what it asks has the step's number, and an answer that it cannot read is noted as such."""
    session.note = {"session": state.session_id, "step": state.iteration_flag.current_value}
    turns = session.turns
    try:
        yield
    except MALFORMED as error:
        if session.turns > turns:
            # OpenHands reports the error to the model, without the answer.
            session.unread(describe(error))
        raise


def record_agent(agent: Agent, session: Session) -> None:
    """Record all further steps of ``agent``, whose own sampling and limits hold.

    An answer that OpenHands cannot parse is kept off the executed path, and a prompt that exceeds the context window
    ends the episode.
    """
    own_step = agent.step
    session.samples = False
    connect(session, agent.llm)
    if isinstance(condenser := getattr(agent, "condenser", None), Condenser):
        record_condenser(condenser, session)
    ask(agent.llm, session.answer)

    def step(state: State) -> Action:
        try:
            with noted_step(session, state):
                action = own_step(state)
        except ContextWindowExceededError:
            session.failure = None
            session.end_here(StopReason.MAX_TOKENS)
            return AgentFinishAction(final_thought="The context window is full.")
        if isinstance(action, AgentFinishAction):
            session.end_here(StopReason.TERMINATED)
        return action

    agent.step = step
