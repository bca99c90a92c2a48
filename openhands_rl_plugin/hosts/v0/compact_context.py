"""What V0 tells of the workspace beside the task, under ``[rl.workspace] prompt = "compact"``.

OpenHands' own text names the folder, which the tools do, too, and the date, by which the same task reads another way
each day: 45 tokens of an example that has 250. What somebody has set, such as instructions of the repository, is told.
"""

from __future__ import annotations

from collections.abc import Iterable

from openhands.core.message import Message, TextContent
from openhands.utils.prompt import PromptManager

_CONTEXT = """\
{% if repository_info -%}
The repository {{ repository_info.repo_name }} is in {{ repository_info.repo_directory }}
{%- if repository_info.branch_name %}; stay on its branch {{ repository_info.branch_name }}{% endif %}.
{% endif -%}
{% if repository_instructions -%}
{{ repository_instructions }}
{% endif -%}
{% if runtime_info -%}
{% for host, port in (runtime_info.available_hosts or {}).items() -%}
A web server may use port {{ port }}, which the user reaches as {{ host }}.
{% endfor -%}
{% if runtime_info.additional_agent_instructions -%}
{{ runtime_info.additional_agent_instructions }}
{% endif -%}
{% for name, description in (runtime_info.custom_secrets_descriptions or {}).items() -%}
The environment variable {{ name }} is set: {{ description }}
{% endfor -%}
{% endif -%}
{% if conversation_instructions and conversation_instructions.content -%}
{{ conversation_instructions.content }}
{% endif %}"""


def tell_shortly(manager: PromptManager) -> None:
    """Change what the manager writes of the workspace; where nothing was set it is an empty text."""
    manager.additional_info_template = manager.env.from_string(_CONTEXT)


def without_empty(messages: Iterable[Message]) -> list[Message]:
    """The messages without users' of no text and no image."""
    return [message for message in messages if message.role != "user" or any(map(_is_told, message.content))]


def _is_told(content: object) -> bool:
    return not isinstance(content, TextContent) or bool(content.text.strip())
