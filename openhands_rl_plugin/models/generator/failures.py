"""Refusals of the server, each with the HTTP status and type that vLLM gives for it."""

from openhands_rl_plugin.core.errors import RLError


class ServingError(RLError):
    """A request (or a start) refused; `str()` is one line that names the cause."""

    status = 400
    kind = "BadRequestError"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidUserInput(ServingError):
    """A field is missing or has a value that cannot be used."""

    kind = "InvalidUserInput"


class NotFound(ServingError):
    """A model, an adapter or a path that is not there."""

    status = 404
    kind = "NotFoundError"


class Unauthorized(ServingError):
    """The API key is absent or wrong."""

    status = 401
    kind = "Unauthorized"


class BodyTooLarge(ServingError):
    """The request body is over the configured bound."""

    status = 413
    kind = "BadRequestError"


class Overloaded(ServingError):
    """The queue is full, or the server is stopping."""

    status = 503
    kind = "ServiceUnavailableError"


class StartError(ServingError):
    """The server cannot start: no such model, the port is taken, an architecture it cannot serve."""

    status = 500
    kind = "InternalServerError"
