"""After the build: python .ci/docs/check.py FOLDER

Every link of every page leads to a page, a file and a place that are there; nothing is fetched from another host; every
public name has a docstring. (Zensical's own strict mode checks links to pages.)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import griffe

ROOT = Path(__file__).parents[2]
_FETCHED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src")}


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[tuple[str, str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.update({given.get("id", ""), given.get("name", "")})
        if tag == "link" and given.get("rel") in ("canonical", "prev", "next"):
            return
        self.links += [(tag, name, given[name]) for name in ("href", "src") if name in given]


def broken(folder: Path) -> Iterator[str]:
    """A line for each link that leads nowhere, or to another host's file."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.html"))}
    for path, page in pages.items():
        shown = path.relative_to(folder)
        for tag, name, link in page.links:
            parts = urlsplit(link)
            if parts.netloc and (tag, name) in _FETCHED:
                yield f"{shown}: {link} is fetched from another host"
            if parts.scheme or parts.netloc or shown.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                yield f"{shown}: {link} is not there"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids | {"__top"}:
                yield f"{shown}: {link}: the page has no such place"


def undocumented() -> Iterator[str]:
    """A line for each public class, function and method without a docstring."""
    sys.path.insert(0, str(Path(__file__).parent))
    import generate

    package = griffe.load("openhands_rl_plugin", search_paths=[str(ROOT)])
    assert isinstance(package, griffe.Module)
    names = list(generate.exports().values())
    for module in ("core.protocols", "testing"):
        names += [
            f"openhands_rl_plugin.{module}.{name}"
            for name, each in package[module].members.items()
            if not name.startswith("_") and not each.is_alias
        ]
    for name in names:
        each = package[name.removeprefix("openhands_rl_plugin.")]
        each = each.final_target if isinstance(each, griffe.Alias) else each
        if each.is_class or each.is_function:
            yield from _without(each, name)


def _without(each: griffe.Object, name: str) -> Iterator[str]:
    if not each.has_docstring:
        yield f"{name} has no docstring"
    if each.is_class:
        for below, member in each.members.items():
            if not below.startswith("_") and not member.is_alias and not member.is_attribute:
                yield from _without(member, f"{name}.{below}")  # type: ignore[arg-type]


if __name__ == "__main__":
    found = [*broken(Path(sys.argv[1]).resolve()), *undocumented()]
    print("\n".join(found), file=sys.stderr)
    sys.exit(1 if found else 0)
