"""Errors of the generator and its server, each with the HTTP status and error type that vLLM gives for it."""

from __future__ import annotations

from openhands_rl_plugin.core.errors import RLError


class ServingError(RLError):
    """A refused request (or start); ``str()`` is one line that names the cause. ``param``: the field at fault."""

    status = 400
    kind = "BadRequestError"

    def __init_subclass__(cls, *, status: int, kind: str) -> None:
        super().__init_subclass__()
        cls.status, cls.kind = status, kind

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidUserInput(ServingError, status=400, kind="InvalidUserInput"):
    """A field is missing or has an invalid value."""


class NotFound(ServingError, status=404, kind="NotFoundError"):
    """A model, an adapter or a path does not exist."""


class Overloaded(ServingError, status=503, kind="ServiceUnavailableError"):
    """The queue is full, or the server is stopping."""


class StartError(ServingError, status=500, kind="InternalServerError"):
    """The server cannot start: no such model, the port is taken, an unsupported architecture."""


class GenerationFailed(ServingError, status=500, kind="InternalServerError"):
    """This sequence could not be computed; the others go on."""


class UpstreamFailure(ServingError, status=502, kind="UpstreamError"):
    """An agent could not answer, because its model or a tool failed."""
