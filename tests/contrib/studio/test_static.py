"""The modules of the pages: what others made is what it says it is, ours are small and write text only."""

from __future__ import annotations

import gzip
import hashlib
import re

from openhands_rl_plugin.contrib.studio.document import STATIC, modules, vendored

OWN = [file for name, file in modules().items() if name.startswith("studio/")]
VENDOR = STATIC / "vendor"


def test_what_others_made_is_listed_with_its_licence_and_digest() -> None:
    listed = vendored()
    assert {each["file"] for each in listed.values()} == {file.name for file in VENDOR.glob("*.mjs")}
    for name, each in listed.items():
        data = (VENDOR / each["file"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == each["sha256"], name
        assert each["version"] and each["licence"] in ("MIT", "ISC", "Apache-2.0")
        assert len((VENDOR / each["licence_text"]).read_text(encoding="utf-8")) > 500
    sizes = [(VENDOR / each["file"]).read_bytes() for each in listed.values()]
    assert sum(map(len, sizes)) < 97_000 and sum(len(gzip.compress(each, 9)) for each in sizes) < 41_000


def test_content_only_ever_becomes_text() -> None:
    """Templates make text nodes and attributes; nothing here parses markup or runs text."""
    markup = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|dangerouslySet|document\.write|DOMParser|createContextualFragment"
        r"|setHTML|srcdoc|\beval\b|new Function|setTimeout\(['\"`]|createPolicy|javascript:"
    )
    found = [f"{file.name}: {hit}" for file in OWN for hit in markup.findall(file.read_text(encoding="utf-8"))]
    assert not found
    outside = re.compile(r"https?://(?!x['\"])[^\s'\"`]+")
    assert [hit for file in OWN for hit in outside.findall(file.read_text(encoding="utf-8"))] == []
