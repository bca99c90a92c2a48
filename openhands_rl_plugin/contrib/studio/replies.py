"""What is the same in all replies: JSON, an ``ETag``, parameters of a query, and errors with cause and remedy."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pydantic import JsonValue, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from openhands_rl_plugin.core.errors import ConfigError, RLError, StorageError
from openhands_rl_plugin.core.redaction import redact_text, redacting_logger
from openhands_rl_plugin.core.types import JsonObject

_LOG = redacting_logger(__name__)


def number(value: float | None) -> float | None:
    """JSON has neither NaN nor infinity: unknown."""
    return value if value is None or math.isfinite(value) else None


def plain(value: JsonValue, longest: int | None = None, most: int | None = None) -> JsonValue:
    """The same without NaN and infinity; texts are cut at ``longest`` characters, lists and objects at ``most``."""
    if isinstance(value, float):
        return number(value)
    if isinstance(value, str):
        return value[:longest]
    if isinstance(value, dict):
        return {name: plain(each, longest, most) for name, each in list(value.items())[:most]}
    return [plain(each, longest, most) for each in value[:most]] if isinstance(value, list) else value


def columns(rows: Mapping[str, Sequence[Any]]) -> JsonObject:
    """A table by columns, all of one length, without those in which every value is ``None``."""
    return {name: list(values) for name, values in rows.items() if any(value is not None for value in values)}


def reply(request: Request, body: Mapping[str, Any], *, revision: str | None = None) -> Response:
    """``body`` as JSON; 304 without one when the client has it. ``revision``: of what was read; by default the body's.

    Raises ``ValueError`` for a NaN.
    """
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=str)
    data = text.encode("utf-8", "replace")
    tag = f'W/"{hashlib.sha256(revision.encode() if revision else data).hexdigest()[:32]}"'
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    if tag in (each.strip() for each in request.headers.get("if-none-match", "").split(",")):
        return Response(status_code=304, headers=headers)
    return Response(data, media_type="application/json", headers=headers)


def whole(request: Request, name: str, default: int, *, least: int = 0, most: int) -> int:
    """A whole number of the query, at most ``most``. Raises ``HTTPException`` 400."""
    text = request.query_params.get(name)
    if text is None or text == "":
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > 18 or int(text) < least:
        raise HTTPException(400, f"{name}={text[:40]!r} is not a whole number of at least {least}")
    return min(int(text), most)


async def _on_error(_: Request, error: Exception) -> Response:
    """``{"error": {"message", "type", "code"}}``, as the other servers' errors are."""
    status, message, kind = 400, str(error), "BadRequestError"
    match error:
        case HTTPException():
            status, message = error.status_code, error.detail
            kind = {404: "NotFoundError", 401: "Unauthorized"}.get(status, kind)
        case ValidationError():
            found = error.errors()[:3]
            message = "; ".join(f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}" for each in found)
        case ConfigError():
            pass
        case RLError():
            status, kind = 503 if isinstance(error, StorageError) else 500, type(error).__name__
        case _:
            _LOG.error("request failed", exc_info=error)
            status, kind = 500, "InternalServerError"
            message = f"{type(error).__name__} in the studio; see its terminal"
    body = {"error": {"message": redact_text(message)[:2000], "type": kind, "param": None, "code": status}}
    return Response(json.dumps(body), status, media_type="application/json", headers={"Cache-Control": "no-store"})


ERROR_HANDLERS: Mapping[Any, Callable[[Request, Any], Awaitable[Response]]] = dict.fromkeys(
    (HTTPException, ValidationError, RLError, Exception), _on_error
)
"""The ``exception_handlers`` of a Starlette application."""
