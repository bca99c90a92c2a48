"""Task folders in Harbor's format, as ``harbor task init`` and Terminal-Bench 2 have them."""

from __future__ import annotations

from pathlib import Path

SHELL_TESTS = """#!/bin/bash
if [ "$(cat /app/hello.txt)" = "Hello, world!" ] && [ -e /app/data/words.txt ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
DOCKERFILE = """FROM ubuntu:24.04
ENV GREETING="Hello, world!"
RUN mkdir -p /app/data && \\
    echo prepared > /app/data/state.txt
WORKDIR /app
COPY words.txt data/
"""


def write_task(
    folder: Path,
    *,
    tests: str = SHELL_TESTS,
    dockerfile: str = DOCKERFILE,
    config: str = "[verifier]\ntimeout_sec = 60.0\n",
    solution: str = 'echo "$GREETING" > /app/hello.txt\n',
) -> Path:
    """A task: write a greeting into ``/app/hello.txt``."""
    for name, text in {
        "task.toml": f'schema_version = "1.4"\n{config}',
        "instruction.md": "Write Hello, world! into /app/hello.txt.\n",
        "environment/Dockerfile": dockerfile,
        "environment/words.txt": "one\ntwo\n",
        "tests/test.sh": tests,
        "solution/solve.sh": f"#!/bin/bash\n{solution}",
    }.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder
