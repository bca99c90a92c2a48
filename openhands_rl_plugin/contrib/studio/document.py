"""The one HTML document, its import map and the headers that bind a browser; the modules are served as they are."""

from __future__ import annotations

import base64
import hashlib
import json
import tomllib
from collections.abc import Mapping
from html import escape
from pathlib import Path

from openhands_rl_plugin.core.messages import visible
from openhands_rl_plugin.core.types import JsonObject

STATIC = Path(__file__).parent / "static"
BOOT = "studio/boot"
"""The module that a page begins with."""
DATA = "studio/data"
"""The module that has the data of a page without a server; else it has none."""
_WHEN_NEEDED = ("uplot",)
_OLD = (
    "The studio starts. If nothing else appears, this browser lacks JavaScript modules or they were blocked: "
    "use Chrome or Edge 123, Firefox 120, Safari 17.5, or newer."
)

HEADERS: Mapping[str, str] = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}
"""Headers of every response."""


def modules() -> dict[str, Path]:
    """Import name -> file: ``studio/NAME`` for each ``static/NAME.mjs``, and the names in ``vendor/vendor.toml``."""
    own = {f"studio/{file.stem}": file for file in sorted(STATIC.glob("*.mjs"))}
    return own | {name: STATIC / "vendor" / each["file"] for name, each in vendored().items()}


def vendored() -> dict[str, dict[str, str]]:
    """Import name -> ``file``, ``version``, ``licence`` and ``sha256`` of what others made."""
    return tomllib.loads((STATIC / "vendor" / "vendor.toml").read_text(encoding="utf-8"))


def import_map() -> str:
    """The text of the import map of the served page."""
    places = {name: f"/static/{file.relative_to(STATIC).as_posix()}" for name, file in modules().items()}
    return json.dumps({"imports": places}, separators=(",", ":"))


def document() -> str:
    """The HTML of every page; which one it is, its address says."""
    places = json.loads(import_map())["imports"]
    preloaded = [place for name, place in places.items() if name not in (BOOT, *_WHEN_NEEDED)]
    return _html(
        "Studio",
        import_map(),
        "/static/studio.css",
        f"{''.join(f'<link rel="modulepreload" href="{place}">' for place in preloaded)}\n"
        '<script type="module" src="/static/boot.mjs"></script>',
        f'<p class="bare late">{_OLD}</p><noscript>The studio needs JavaScript.</noscript>',
    )


def content_security_policy() -> str:
    """A policy that allows only the studio's own modules, style and data, and the import map by its digest."""
    return (
        f"default-src 'none'; script-src 'self' 'sha256-{_digest(import_map())}'; style-src 'self'; "
        "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    )


def single_file(data: JsonObject, title: str = "Episodes") -> str:
    """A page with its modules, its style and ``data`` in it; nothing is fetched."""
    script = f"export default JSON.parse({json.dumps(json.dumps(data))});"
    texts = {name: file.read_text(encoding="utf-8") for name, file in modules().items()} | {DATA: script}
    places = {name: f"data:text/javascript;base64,{_base64(text)}" for name, text in texts.items()}
    found = json.dumps({"imports": places}, separators=(",", ":"))
    style = f"data:text/css;base64,{_base64((STATIC / 'studio.css').read_text(encoding='utf-8'))}"
    boot = f'import "{BOOT}";'
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in (found, boot))
    policy = (
        f"default-src 'none'; script-src data: {allowed}; style-src data:; img-src data:; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'"
    )
    return _html(
        escape(visible(title)),
        found,
        style,
        f'<script type="module">{boot}</script>',
        "<noscript>This page needs JavaScript.</noscript>",
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
    )


def _html(title: str, places: str, style: str, scripts: str, body: str, policy: str = "") -> str:
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{policy}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{title}</title>\n'
        f'<script type="importmap">{places}</script>\n<link rel="stylesheet" href="{style}">\n{scripts}\n</head>\n'
        f'<body><div id="app">{body}</div></body>\n</html>\n'
    )


def _base64(text: str) -> str:
    return base64.b64encode(text.encode("utf-8", "replace")).decode()


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
