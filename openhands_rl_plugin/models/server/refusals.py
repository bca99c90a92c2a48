"""Errors as HTTP answers in vLLM's shape."""

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.models.generator.failures import ServingError
from openhands_rl_plugin.models.server.responses import ErrorAnswer, ErrorInfo

log = redacting_logger(__name__)


def refusal(error: ServingError) -> Response:
    """`{"error": {"message", "type", "param", "code"}}` with the error's status."""
    return _answer(error.status, error.message, error.kind, error.param)


async def on_serving_error(_: Request, error: Exception) -> Response:
    """Handler for ServingError."""
    assert isinstance(error, ServingError)
    return refusal(error)


async def on_invalid_body(_: Request, error: Exception) -> Response:
    """Handler for pydantic's ValidationError: 400 with the first faults, each with its field."""
    assert isinstance(error, ValidationError)
    faults = [f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors()[:3]]
    first = error.errors()[0]["loc"]
    return _answer(400, "; ".join(faults), "BadRequestError", str(first[0]) if first else None)


async def on_http_exception(_: Request, error: Exception) -> Response:
    """Handler for unknown paths and methods."""
    assert isinstance(error, HTTPException)
    kind = "NotFoundError" if error.status_code == 404 else "BadRequestError"
    return _answer(error.status_code, error.detail, kind, None)


async def on_cancelled(_: Request, __: Exception) -> Response:
    """Handler for requests that the generator gave up: it is stopping."""
    return _answer(503, "The server is stopping.", "ServiceUnavailableError", None)


async def on_defect(_: Request, error: Exception) -> Response:
    """Handler for everything else; the cause goes to the log."""
    log.error("request failed", exc_info=error)
    return _answer(500, f"{type(error).__name__} in the server; see its log", "InternalServerError", None)


def error_body(status: int, message: str, kind: str, param: str | None = None) -> ErrorAnswer:
    """The body of a refusal."""
    return ErrorAnswer(error=ErrorInfo(message=message, type=kind, param=param, code=status))


def _answer(status: int, message: str, kind: str, param: str | None) -> Response:
    body = error_body(status, message, kind, param)
    return Response(body.model_dump_json(), status, media_type="application/json")
