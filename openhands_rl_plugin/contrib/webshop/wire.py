"""The HTTP messages: validated request bodies, and answers in the formats of the two protocols."""

from __future__ import annotations

from typing import Annotated

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, JsonValue

from openhands_rl_plugin.contrib.webshop.engine import StepResult, WebShopSession
from openhands_rl_plugin.core.errors import RLError

Index = Annotated[int, Field(ge=0, lt=2**53)]
SessionName = Annotated[str, Field(min_length=1, max_length=128)]


class BadFieldError(RLError):
    """A request lacks a field or has a wrong one."""


class SessionReference(BaseModel):
    """The fields that name a session: `session` or `idx` (simple protocol), `env_idx` or `id` (AgentGym)."""

    model_config = ConfigDict(strict=True, frozen=True)

    session: SessionName | None = None
    idx: Index | None = None
    env_idx: Index | None = Field(default=None, validation_alias=AliasChoices("env_idx", "id"))

    @property
    def speaks_agentgym(self) -> bool:
        """Whether the request is in AgentGym's form."""
        return self.env_idx is not None

    def key(self) -> str | None:
        """The session's key, or None where the request does not name a session by itself."""
        return environment_key(self.env_idx) if self.env_idx is not None else self.session


class ResetBody(SessionReference):
    """Body of `POST /reset`: the goal is `idx`, in AgentGym's form `session_id`."""

    session_id: Index | None = None


class StepBody(SessionReference):
    """Body of `POST /step`."""

    action: str


_ENVIRONMENT_PREFIX = "env-"


def environment_key(env_idx: int) -> str:
    """The session key of an AgentGym environment."""
    return f"{_ENVIRONMENT_PREFIX}{env_idx}"


def environment_index(key: str) -> int | None:
    """The AgentGym environment that `key` belongs to, or None for a session of the simple protocol."""
    digits = key.removeprefix(_ENVIRONMENT_PREFIX)
    return int(digits) if digits != key and digits.isascii() and digits.isdigit() else None


def simple_reset_answer(key: str, session: WebShopSession) -> dict[str, JsonValue]:
    """The answer to a reset in the simple protocol."""
    return {
        "state": session.observation,
        "reward": 0.0,
        "done": False,
        "session": key,
        "info": {"goal_index": session.goal.index, "instruction": session.goal.instruction},
    }


def simple_step_answer(session: WebShopSession, result: StepResult) -> dict[str, JsonValue]:
    """The answer to a step in the simple protocol; `info` is filled when the episode is done."""
    return {
        "state": result.state,
        "reward": result.reward,
        "done": result.done,
        "truncated": result.truncated,
        "info": _evidence(session) if result.done else {},
    }


def agentgym_step_answer(result: StepResult) -> dict[str, JsonValue]:
    """The answer to a step in AgentGym's form."""
    return {"state": result.state, "reward": result.reward, "done": result.done, "info": None}


def _evidence(session: WebShopSession) -> dict[str, JsonValue]:
    purchase = session.purchase
    evidence: dict[str, JsonValue] = {
        "goal_index": session.goal.index,
        "instruction": session.goal.instruction,
        "steps": session.steps,
        "purchase": None,
    }
    if purchase is not None:
        judged = purchase.breakdown
        evidence["purchase"] = {
            "asin": purchase.asin,
            "options": dict(purchase.options),
            "r_type": judged.r_type,
            "r_att": judged.r_att,
            "r_option": judged.r_option,
            "r_price": judged.r_price,
            "reward": judged.reward,
        }
    return evidence
