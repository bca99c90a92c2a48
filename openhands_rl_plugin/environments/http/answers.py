"""What a server answers to ``/reset`` and ``/step``, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from openhands_rl_plugin.core.errors import BadEnvironmentError
from openhands_rl_plugin.environments.http.transport import excerpt


class ServerAnswer(BaseModel):
    """The answer to ``/reset`` or ``/step``. Other keys are ignored; a wrong type is an error.

    ``reward`` and one of ``done``, ``terminated`` and ``truncated`` may be left out by ``/reset`` only: a step that
    says nothing of its reward has none, which is not 0.0.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    state: str = Field(validation_alias=AliasChoices("state", "observation"))
    reward: float = 0.0
    done: bool = False
    terminated: bool = False
    truncated: bool = False
    info: JsonValue = None

    @classmethod
    def parse(cls, answer: JsonValue, path: str) -> Self:
        """Check an answer. Raises ``BadEnvironmentError`` that names the field."""
        if not isinstance(answer, dict):
            raise BadEnvironmentError(f"{path} answered {excerpt(str(answer))}, which is not a JSON object")
        if answer.get("error"):
            raise BadEnvironmentError(f"{path} answered an error: {excerpt(str(answer['error']))}")
        try:
            return cls.model_validate(answer)
        except ValidationError as invalid:
            first = invalid.errors(include_url=False)[0]
            field = ".".join(str(part) for part in first["loc"][:3])
            raise BadEnvironmentError(f"{path} answered a wrong '{field}': {first['msg']}") from invalid

    def told(self, path: str) -> Self:
        """This answer to a step. Raises ``BadEnvironmentError`` when it does not say what the step was worth."""
        if "reward" not in self.model_fields_set:
            inside = isinstance(self.info, dict) and "reward" in self.info
            hint = "the one in 'info' does not count: answer it beside 'state'" if inside else "answer a number"
            raise BadEnvironmentError(f"{path} answered no 'reward': {hint}, 0.0 where a step earns nothing")
        if not self.model_fields_set & {"done", "terminated", "truncated"}:
            raise BadEnvironmentError(f"{path} answered no 'done', so that no episode would end there")
        return self

    def same_as(self, other: ServerAnswer | None) -> bool:
        """Whether observation, reward and end of episode are equal; ``info`` and sessions may differ."""
        mine = (self.state, self.reward, self.done, self.terminated, self.truncated)
        return other is not None and mine == (other.state, other.reward, other.done, other.terminated, other.truncated)

    @property
    def ended(self) -> bool:
        """The task itself ended; an episode that a limit of the server ended is ``truncated`` instead."""
        return self.terminated or (self.done and not self.truncated)


@dataclass(frozen=True, slots=True)
class EpisodeStep:
    """One executed action with the server's answer, or a malformed action that was not sent to the server."""

    action: str | None
    answer: ServerAnswer | None = None

    @property
    def reward(self) -> float:
        """The reward of the step."""
        return self.answer.reward if self.answer is not None else 0.0


class SessionAnswer(ServerAnswer):
    """The answer to ``/reset``, with a session where the server can run several episodes of one task."""

    session: str | int | None = Field(default=None, validation_alias=AliasChoices("session", "session_id"))
