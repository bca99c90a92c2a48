"""The base class of the ``[rl]`` sections' models, and the types of names and addresses in them."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict


def _variable_name(value: str) -> str:
    if value and re.fullmatch(r"[A-Za-z_]\w*", value) is None:
        raise ValueError("must be the NAME of an environment variable, not the secret itself")
    return value


def _http_url(value: str) -> str:
    parts = urlsplit(value)
    if value and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise ValueError('must be an http:// or https:// URL, for example "http://127.0.0.1:8100/v1"')
    return value.rstrip("/")


def _safe_name(value: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value) is None or ".." in value:
        raise ValueError("may hold letters, digits, '.', '_' and '-' only, and no '..'")
    return value


VariableName = Annotated[str, AfterValidator(_variable_name)]
HttpUrl = Annotated[str, AfterValidator(_http_url)]
SafeName = Annotated[str, AfterValidator(_safe_name)]


class Settings(BaseModel):
    """Base of the sections: frozen, strict about types (TOML has its own), no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
