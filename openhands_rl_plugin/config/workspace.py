"""``[rl.workspace]``: what commands of an agent may see and use of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from openhands_rl_plugin.config.fields import Settings
from openhands_rl_plugin.config.host_paths import checked_path
from openhands_rl_plugin.config.network import check_host

PromptName = Literal["standard", "compact"]


class WorkspaceSettings(Settings):
    """``[rl.workspace]``: the sandbox of an agent that works on files. Sizes are in MiB, and of a whole session."""

    isolation: Literal["bubblewrap", "none"] = Field(
        default="bubblewrap",
        description="none: commands run with all rights of this user, where there is no bubblewrap",
    )
    prompt: PromptName = Field(
        default="standard",
        description="compact: RLAgent's own short instructions and tools (under 700 tokens), for small models",
    )
    whole_home: bool = Field(default=False, description="allow a whole home in visible and writable, with its keys")
    visible: tuple[str, ...] = Field(
        default=(), strict=False, description="folders and files of the host that commands may read, by their own paths"
    )
    writable: tuple[str, ...] = Field(
        default=(), strict=False, description="folders and files of the host that commands may change"
    )
    network: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description='what commands may reach: lists ("pypi", "npm", "crates", "github") and hosts ("*.example.com")',
    )
    traffic: int = Field(default=8192, ge=1, description="MiB that a session may exchange with them")
    memory: int = Field(default=8192, ge=64, description="MiB of memory of all processes of a session")
    processes: int = Field(default=4096, ge=16, description="processes of a session at a time")
    temporary: int = Field(default=2048, ge=1, description="MiB of /tmp, and of /dev/shm")
    disk: int = Field(default=32_768, ge=1, description="MiB that a session may add to its workspace")

    @property
    def is_compact(self) -> bool:
        """Whether the agent gets the short instructions."""
        return self.prompt == "compact"

    @property
    def visible_paths(self) -> tuple[Path, ...]:
        """``visible`` as real paths."""
        return tuple(checked_path(text, whole_home=self.whole_home) for text in self.visible)

    @property
    def writable_paths(self) -> tuple[Path, ...]:
        """``writable`` as real paths."""
        return tuple(checked_path(text, whole_home=self.whole_home) for text in self.writable)

    @field_validator("visible", "writable")
    @classmethod
    def _check_paths(cls, texts: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        for text in texts:
            checked_path(text, whole_home=info.data.get("whole_home", False))
        return texts

    @field_validator("network")
    @classmethod
    def _check_network(cls, names: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if names and info.data.get("isolation") == "none":
            raise ValueError('isolation = "none" leaves commands the whole network; remove one of the two')
        return tuple(check_host(name) for name in names)
