"""What the index shows of the package: README with links that lead somewhere, and the address of the repository.

The repository is that of ``OPENHANDS_RL_REPOSITORY``, or of git's remote ``origin``; a wheel that is built from an
sdist takes it from there. Where none is known, links to files are plain text.
"""

from __future__ import annotations

import os
import re
import subprocess
from email.parser import HeaderParser
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")


class WheelMetadata(MetadataHookInterface):
    """Fills in ``readme`` and ``urls``."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict) -> None:
        root = Path(self.root)
        text = (root / "README.md").read_text(encoding="utf-8")
        urls = _urls_of_sdist(root) or _urls(_repository(root))
        files = urls.get("Repository", "")
        text = _LINK.sub(rf"[\1]({files}/blob/main/\2)" if files else r"\1", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls


def _urls(repository: str) -> dict[str, str]:
    urls = {"OpenHands": "https://github.com/OpenHands/OpenHands"}
    if repository:
        urls["Repository"] = repository
        urls["Changelog"] = f"{repository}/blob/main/docs/changelog.md"
        urls["Issues"] = f"{repository}/issues"
    return urls


def _urls_of_sdist(root: Path) -> dict[str, str]:
    if not (root / "PKG-INFO").exists():
        return {}
    lines = HeaderParser().parsestr((root / "PKG-INFO").read_text(encoding="utf-8")).get_all("Project-URL") or []
    return dict(line.split(", ", 1) for line in lines)


def _repository(root: Path) -> str:
    if given := os.environ.get("OPENHANDS_RL_REPOSITORY"):
        return given.rstrip("/")
    try:
        asked = subprocess.run(
            ["git", "-C", root, "remote", "get-url", "origin"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    # git@host:owner/name.git and https://user:token@host/owner/name.git alike, without what is secret.
    found = re.fullmatch(
        r"(?:https?://(?:[^@/]+@)?|(?:ssh://)?git@)([\w.-]+)[:/](.+?)(?:\.git)?/?", asked.stdout.strip()
    )
    return f"https://{found[1]}/{found[2]}" if found else ""
