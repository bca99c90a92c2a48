"""An environment of tools: the model calls them until it gives its answer.

    environment = ToolEnvironment(tools=(ThinkTool(), FinalTool(), FunctionTool(look_up)))

Each model response is one step, a malformed one too. When one of the tools ends the episode (``FinalTool``), only its
argument reaches the user; otherwise a response without calls is the final answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pydantic import Field, JsonValue

from openhands_rl_plugin.core.errors import BadEnvironmentError
from openhands_rl_plugin.core.messages import to_message
from openhands_rl_plugin.core.protocols import EnvInfo
from openhands_rl_plugin.core.types import Frozen, JsonObject, Message, Observation, Task, ToolCall
from openhands_rl_plugin.environments.tools.base import FinalTool as FinalTool
from openhands_rl_plugin.environments.tools.base import FunctionTool as FunctionTool
from openhands_rl_plugin.environments.tools.base import ThinkTool as ThinkTool
from openhands_rl_plugin.environments.tools.base import ToolBase as ToolBase
from openhands_rl_plugin.environments.tools.base import checked, load_tool
from openhands_rl_plugin.environments.tools.calls import ToolBox, ToolListener, ToolOutcome
from openhands_rl_plugin.environments.tools.calls import ToolCallStarted as ToolCallStarted
from openhands_rl_plugin.environments.tools.calls import ToolEvent as ToolEvent
from openhands_rl_plugin.environments.tools.calls import ToolResult as ToolResult
from openhands_rl_plugin.environments.tools.dialects import (
    Dialect,
    NativeDialect,
    OpenedThought,
    ReadAnswer,
    TextDialect,
)
from openhands_rl_plugin.environments.tools.feedback import Feedback, FeedbackCode

_WITH_TOOLS = "You are a careful assistant. Solve the task step by step with the tools that you are given."
_PRIVATE = "What you give to {private} stays private."
_ENDING = "The user reads only what you give to {ending}: end every task with one call of it."
_SPEAKING = "When you know the answer, write it without calling a tool."


class ToolOptions(Frozen):
    """``tools``: names for ``load_tool``.

    ``template``: the model family whose format calls have in the text; empty: the server's own tool calls.
    ``opens_thought``: the model's prompt ends with ``<think>`` (Qwen3-Thinking, DeepSeek-R1), and the server leaves the
    reasoning in the response; all text up to ``</think>`` is then reasoning.
    ``system_prompt`` replaces the built-in words; a system message of the conversation is kept after it.
    ``tool_timeout`` is in seconds and bounds one call, ``max_result_length`` is in characters.
    """

    tools: tuple[str, ...] = (ThinkTool.name, FinalTool.name)
    template: str = ""
    opens_thought: bool = False
    system_prompt: str | None = None
    tool_timeout: float = Field(default=60.0, gt=0)
    max_result_length: int = Field(default=65_536, ge=1)


class ToolEnvironment:
    """One conversation with tools, as a ``protocols.Environment``.

    A task's ``data`` may hold ``messages`` (a conversation in OpenAI's format, to which ``instruction`` is appended as
    a user message) and ``label``, which is not part of the conversation but evidence for a reward.

    ``tools`` replace those that the options name; a tool with state must not be shared. ``listener`` receives the calls
    that a user may see. Raises ``ConfigError`` for invalid tools or an unknown template.
    """

    Options = ToolOptions

    def __init__(
        self,
        options: ToolOptions | None = None,
        *,
        tools: Sequence[ToolBase] | None = None,
        listener: ToolListener | None = None,
    ) -> None:
        self.options = options or ToolOptions()
        self._tools = checked([load_tool(name) for name in self.options.tools] if tools is None else tools)
        self._box = ToolBox(self._tools, self.options.tool_timeout, self.options.max_result_length, listener)
        dialect = TextDialect(self.options.template) if self.options.template else NativeDialect()
        self._dialect: Dialect = OpenedThought(dialect) if self.options.opens_thought else dialect
        self._schemas = tuple(tool.openai_tool() for tool in self._tools)
        self._ending = tuple(tool.name for tool in self._tools if tool.ends)
        self._answer: str | None = None
        self._label: JsonValue = None
        self._open = False
        self._steps = 0
        self._calls: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()

    @property
    def info(self) -> EnvInfo:
        """With the tools in the requests to the model server."""
        return EnvInfo(tools=self._dialect.offered(self._schemas))

    @property
    def speaks(self) -> bool:
        """Whether the text of a response is for the user; false where a tool delivers the answer."""
        return not self._ending

    def read(self, message: Message) -> ReadAnswer:
        """A response, parsed into calls, problems and speech."""
        return self._dialect.read(message)

    def said(self, unfinished: str) -> str:
        """The part of an unfinished response that is certain to be speech, not a call or reasoning."""
        return self._dialect.said(unfinished)

    async def reset(self, task: Task) -> Observation:
        """Open the conversation: one system message (none when it would be empty), then the task's messages."""
        messages = [*_conversation(task)]
        if task.instruction:
            messages.append(Message(role="user", content=task.instruction))
        if all(message.role == "system" for message in messages):
            raise BadEnvironmentError(f"task {task.id!r} is empty: give it an instruction, or data.messages")
        given = [message.content for message in messages if message.role == "system" and message.content]
        text = self._dialect.system("\n\n".join(part for part in (self._prompt(), *given) if part), self._schemas)
        system = [Message(role="system", content=text)] if text else []
        self._label = task.data.get("label")
        self._open = True
        return Observation(messages=(*system, *(message for message in messages if message.role != "system")))

    async def step(self, action: Message) -> Observation:
        """Execute the calls of one response; without any, the observation is feedback for the model."""
        if not self._open:
            raise BadEnvironmentError("the conversation is not open: reset it first, and do not step after its end")
        self._steps += 1
        answer = self._dialect.read(action)
        if answer.calls:
            return await self._execute(answer)
        if answer.problems:
            return self._told((), answer.problems)
        if answer.speech and self.speaks:
            return self._end(answer.speech, ())
        return self._refuse(Feedback(FeedbackCode.NO_TOOL_CALL, "The answer holds no tool call."))

    async def evidence(self) -> JsonObject:
        """The answer (``None``: none), the label, the number of steps, calls by tool name and errors by code."""
        return {
            "answer": self._answer,
            "label": self._label,
            "steps": self._steps,
            "calls": dict(sorted(self._calls.items())),
            "errors": dict(sorted(self._errors.items())),
        }

    async def close(self) -> None:
        """End the conversation."""
        self._open = False

    async def _execute(self, answer: ReadAnswer) -> Observation:
        calls = tuple(
            call if call.id else call.model_copy(update={"id": f"call_{self._steps}_{at}"})
            for at, call in enumerate(answer.calls)
        )
        outcomes = await self._box.execute(calls)
        self._calls.update(outcome.call.name for outcome in outcomes if outcome.feedback is None)
        told = self._told(outcomes, answer.problems)
        ended = next((outcome for outcome in outcomes if outcome.ends), None)
        return told if ended is None else self._end(ended.text, told.messages)

    def _end(self, answer: str, messages: Sequence[Message]) -> Observation:
        self._answer, self._open = answer, False
        return Observation(messages=tuple(messages), terminated=True)

    def _told(self, outcomes: Sequence[ToolOutcome], problems: Sequence[str]) -> Observation:
        """The results in the order of the calls, then the problems of calls that could not be parsed."""
        told: list[tuple[ToolCall, str]] = []
        for outcome in outcomes:
            text = "delivered" if outcome.ends else outcome.text
            told.append((outcome.call, self._render(outcome.feedback) if outcome.feedback else text))
        messages = self._dialect.results(told)
        if problems:
            feedback = Feedback(FeedbackCode.INVALID_ACTION_FORMAT, " ".join(problems))
            messages += (Message(role="user", content=self._render(feedback)),)
        return Observation(messages=messages)

    def _refuse(self, feedback: Feedback) -> Observation:
        return Observation(messages=(Message(role="user", content=self._render(feedback)),))

    def _render(self, feedback: Feedback) -> str:
        self._errors[feedback.code.value] += 1
        return feedback.render([tool.name for tool in self._tools], self._ending)

    def _prompt(self) -> str:
        if self.options.system_prompt is not None:
            return self.options.system_prompt
        if not self._tools:
            return ""
        private = [tool.name for tool in self._tools if tool.private]
        parts = [_WITH_TOOLS]
        if private:
            parts.append(_PRIVATE.format(private=" and ".join(private)))
        parts.append(_ENDING.format(ending=" or ".join(self._ending)) if self._ending else _SPEAKING)
        return " ".join(parts)


def _conversation(task: Task) -> list[Message]:
    given = task.data.get("messages") or []
    if not isinstance(given, list):
        raise BadEnvironmentError(f"task {task.id!r}: data.messages must be a list of chat messages")
    try:
        return [to_message(message) for message in given]  # pyright: ignore[reportArgumentType]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BadEnvironmentError(f"task {task.id!r}: data.messages holds an invalid chat message: {error}") from error
