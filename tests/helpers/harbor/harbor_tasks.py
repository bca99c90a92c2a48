"""Task folders in Harbor's format, as ``harbor task init`` and Terminal-Bench 2 have them."""

from __future__ import annotations

from pathlib import Path

# As in Terminal-Bench 2: it fetches uv and runs pytest with it.
UV_TESTS = """#!/bin/bash
apt-get update
apt-get install -y curl
curl -LsSf https://astral.sh/uv/0.9.7/install.sh | sh
source $HOME/.local/bin/env
uvx \\
  -p 3.13 \\
  -w pytest==8.4.1 \\
  -w pytest-json-ctrf==0.3.5 \\
  pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA

if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
SHELL_TESTS = """#!/bin/bash
if [ "$(cat /app/hello.txt)" = "Hello, world!" ] && [ -e /app/data/words.txt ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
OUTPUTS = """
from pathlib import Path

def test_greeting():
    assert Path("/app/hello.txt").read_text().strip() == "Hello, world!"
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
        "tests/test_outputs.py": OUTPUTS,
        "solution/solve.sh": f"#!/bin/bash\n{solution}",
    }.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder
