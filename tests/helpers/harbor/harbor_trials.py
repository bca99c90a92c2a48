"""Trials of the installed Harbor, and an environment of its kind without containers. Run by Harbor's Python.

``python harbor_trials.py``: standard input is a list of trials as Harbor's ``TrialConfig`` has them, standard output a
list of what came of each; its ATIF files are read by Harbor's models.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from folder_container import FolderContainer
from harbor.environments.base import BaseEnvironment, ExecResult  # pyright: ignore[reportMissingImports]
from harbor.models.trajectories import Trajectory  # pyright: ignore[reportMissingImports]
from harbor.models.trial.config import TrialConfig  # pyright: ignore[reportMissingImports]
from harbor.trial.trial import Trial  # pyright: ignore[reportMissingImports]


class FolderEnvironment(BaseEnvironment):
    """Of Harbor's kind, over a ``FolderContainer`` with what ``harbor_tasks`` has in its Dockerfile."""

    @staticmethod
    def type() -> str:
        return "folder"

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        self.container = FolderContainer(Path(tempfile.mkdtemp(prefix="harbor-trial-")))
        data = self.container.root / "app/data"
        data.mkdir()
        (data / "state.txt").write_text("prepared\n")
        shutil.copy(self.environment_dir / "words.txt", data)

    async def stop(self, delete: bool) -> None:
        shutil.rmtree(self.container.root)

    async def exec(self, command: str, cwd=None, env=None, timeout_sec=None, user=None) -> ExecResult:
        words = [f"cd {cwd}"] if cwd else []
        words += [f"export {name}='{value}'" for name, value in (self._merge_env(env) or {}).items()]
        ran = await self.container.exec("\n".join([*words, command]), timeout_sec=timeout_sec)
        return ExecResult(stdout=ran.stdout, stderr=ran.stderr, return_code=ran.return_code)

    def _inside(self, path: str) -> Path:
        return self.container.root / str(path).lstrip("/")

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        self._inside(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, self._inside(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, self._inside(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        shutil.copy(self._inside(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self._inside(source_dir), target_dir, dirs_exist_ok=True)


async def run(config: dict[str, Any]) -> dict[str, Any]:
    """One trial."""
    try:
        trial = await Trial.create(TrialConfig.model_validate(config))
    except ValueError as error:
        return {"refused": str(error)}
    result = (await trial.run()).model_dump(mode="json")
    folder = Path(config["trials_dir"]) / config["trial_name"] / "agent"
    documents = [Trajectory.model_validate_json(each.read_text()) for each in sorted(folder.glob("trajectory*.json"))]
    failed = result["exception_info"] or {}
    return {
        "rewards": (result["verifier_result"] or {}).get("rewards"),
        "exception": failed.get("exception_type"),
        "message": failed.get("exception_message"),
        "agent": result["agent_info"],
        "context": result["agent_result"],
        "documents": [each.to_json_dict() for each in documents],
    }


async def main() -> None:
    """All of them, side by side."""
    told = await asyncio.gather(*(run(each) for each in json.load(sys.stdin)))
    print(json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main())
