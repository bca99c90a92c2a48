"""What is the same in all replies: JSON, an ``ETag``, parameters of a query, and errors with cause and remedy."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pydantic import JsonValue, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from openhands_rl_plugin.core.errors import ConfigError, RLError, StorageError
from openhands_rl_plugin.core.redaction import redact_text, redacting_logger

Columns = dict[str, list[JsonValue]]
"""A table by columns, all of one length. A column in which nothing is known is left out."""

_LOG = redacting_logger(__name__)


def number(value: float | None) -> float | None:
    """JSON has neither NaN nor infinity: unknown."""
    return value if value is None or math.isfinite(value) else None


def plain(value: JsonValue) -> JsonValue:
    """The same without NaN and infinity."""
    if isinstance(value, float):
        return number(value)
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


def columns(rows: Mapping[str, list[JsonValue]]) -> Columns:
    """``rows`` without the columns in which every value is ``None``."""
    return {name: values for name, values in rows.items() if any(value is not None for value in values)}


def reply(request: Request, body: Mapping[str, Any], *, revision: str | None = None) -> Response:
    """``body`` as JSON; 304 without one when the client has it. ``revision``: of what was read; by default the body's.

    Raises ``ValueError`` for a NaN.
    """
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=str)
    data = text.encode("utf-8", "replace")
    tag = f'W/"{hashlib.sha256(revision.encode() if revision else data).hexdigest()[:32]}"'
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    if has(request, tag):
        return Response(status_code=304, headers=headers)
    return Response(data, media_type="application/json", headers=headers)


def has(request: Request, tag: str) -> bool:
    """Whether the client's copy is the one of ``tag``."""
    known = request.headers.get("if-none-match", "")
    return tag in (each.strip() for each in known.split(","))


def whole(request: Request, name: str, default: int, *, least: int = 0, most: int) -> int:
    """A whole number of the query, at most ``most``. Raises ``HTTPException`` 400."""
    text = request.query_params.get(name)
    if text is None or text == "":
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > 18 or int(text) < least:
        raise HTTPException(400, f"{name}={text[:40]!r} is not a whole number of at least {least}")
    return min(int(text), most)


def error_reply(status: int, message: str, kind: str) -> Response:
    """``{"error": {"message", "type", "code"}}``, as the other servers' errors are."""
    body = {"error": {"message": redact_text(message)[:2000], "type": kind, "param": None, "code": status}}
    return Response(json.dumps(body), status, media_type="application/json", headers={"Cache-Control": "no-store"})


async def _on_http(_: Request, error: HTTPException) -> Response:
    kind = {404: "NotFoundError", 401: "Unauthorized"}.get(error.status_code, "BadRequestError")
    return error_reply(error.status_code, error.detail, kind)


async def _on_invalid(_: Request, error: ValidationError) -> Response:
    said = [f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}" for each in error.errors()[:3]]
    return error_reply(400, "; ".join(said), "BadRequestError")


async def _on_config(_: Request, error: ConfigError) -> Response:
    return error_reply(400, str(error), "BadRequestError")


async def _on_storage(_: Request, error: StorageError) -> Response:
    return error_reply(503, str(error), type(error).__name__)


async def _on_other(_: Request, error: RLError) -> Response:
    return error_reply(500, str(error), type(error).__name__)


async def _on_unexpected(_: Request, error: Exception) -> Response:
    _LOG.error("request failed", exc_info=error)
    return error_reply(500, f"{type(error).__name__} in the studio; see its terminal", "InternalServerError")


ERROR_HANDLERS: Mapping[Any, Callable[[Request, Any], Awaitable[Response]]] = {
    HTTPException: _on_http,
    ValidationError: _on_invalid,
    ConfigError: _on_config,
    StorageError: _on_storage,
    RLError: _on_other,
    Exception: _on_unexpected,
}
"""The ``exception_handlers`` of a Starlette application."""
