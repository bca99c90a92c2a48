"""Texts of a model or an environment that try to act on a page, a terminal or a spreadsheet when they are shown."""

from __future__ import annotations

MARKUP = (
    "<script>window.owned=1</script>",
    "</script><script>window.owned=1</script>",
    "</style><script>window.owned=1</script><style>",
    "<img src=x onerror=window.owned=1>",
    "<svg onload=window.owned=1>",
    "\"><img src=x onerror='window.owned=1'>",
    "' onmouseover='window.owned=1' autofocus onfocus='window.owned=1",
    "<a href='javascript:window.owned=1'>click</a>",
    "<iframe srcdoc='<script>parent.owned=1</script>'></iframe>",
    "<meta http-equiv=refresh content='0;url=http://127.0.0.1:1/'>",
    "<link rel=stylesheet href=http://127.0.0.1:1/x.css><base href=http://127.0.0.1:1/>",
    "<style>@import 'http://127.0.0.1:1/y.css'; body{display:none}</style>",
    "]]><![CDATA[<script>window.owned=1</script>",
    "--><script>window.owned=1</script><!--",
    "<form action=http://127.0.0.1:1/><button autofocus>ok</button></form>",
    "&lt;script&gt;window.owned=1&lt;/script&gt;",
)
CONTROLS = (
    "\x1b[2J\x1b[H",
    "\x1b]0;owned\x07",
    "\x1b]8;;http://127.0.0.1:1/\x1b\\link\x1b]8;;\x1b\\",
    "\x1b]52;c;b3duZWQ=\x07",
    "\x9b31mred",
    "over\rwritten",
    "\b\b\b",
    "\u202egnp.exe",
    "\u2066isolated\u2069",
    "[bold]rich[/bold] [/nope] [link=http://127.0.0.1:1/]x[/link]",
)
_OBEYED = (range(0x09), range(0x0B, 0x20), range(0x7F, 0xA0), range(0x202A, 0x202F), range(0x2066, 0x206A))
ACTED_UPON = frozenset(chr(code) for codes in _OBEYED for code in codes)
"""Characters that a terminal, or the direction of writing, obeys; line feed and tab aside."""
TEXT = " ".join((*MARKUP, *CONTROLS))
