"""What OpenHands' condensers ask a model, recorded as nodes of their own kind; and the compact context.

OpenHands' own text of the workspace names the folder, which the tools do, too, and the date, by which the same task
reads another way each day: 45 tokens of a task that has 150. What somebody has set, such as instructions of the
repository, stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openhands.core.config import AgentConfig
from openhands.core.message import Message, TextContent
from openhands.events.observation import Observation
from openhands.events.observation.agent import RecallObservation
from openhands.llm.llm import LLM
from openhands.memory.condenser.condenser import Condenser
from openhands.memory.condenser.impl.pipeline import CondenserPipeline
from openhands.memory.conversation_memory import ConversationMemory
from openhands.utils.prompt import PromptManager

from openhands_rl_plugin.core.types import CONDENSATION
from openhands_rl_plugin.hosts.v0.completion import ask_beside
from openhands_rl_plugin.session.session import Session


def record_condenser(condenser: Condenser, session: Session) -> None:
    """Record what a condenser asks a model."""
    for llm in _models(condenser):
        ask_beside(llm, session, CONDENSATION)


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
