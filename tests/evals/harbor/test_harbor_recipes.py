"""What is read from Dockerfiles and test scripts, and what becomes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harbor_tasks import write_task

from openhands_rl_plugin.core.errors import BadEnvironmentError
from openhands_rl_plugin.core.types import Message, Task
from openhands_rl_plugin.evals.harbor.container import HarborContainer
from openhands_rl_plugin.evals.harbor.environment import HarborEnvironment, HarborOptions
from openhands_rl_plugin.evals.harbor.recipe import ContainerRecipe, read_recipe
from openhands_rl_plugin.evals.harbor.tasks import read_task
from openhands_rl_plugin.evals.harbor.test_script import TestNeeds, needs_of
from openhands_rl_plugin.evals.harbor.verification import judge, verify


def recipe(folder: Path, text: str) -> ContainerRecipe:
    (folder / "Dockerfile").write_text(f"FROM ubuntu:24.04\n{text}\n")
    return read_recipe(folder / "Dockerfile")


def needs(folder: Path, text: str) -> TestNeeds:
    (folder / "requirements.txt").write_text("# for the tests\nattrs==24.2.0  # pinned\n\ninflection\n")
    (folder / "test.sh").write_text(text)
    return needs_of(folder / "test.sh")


BUILT = """FROM ubuntu:24.04
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /app
ENV A=1 B=${C:-three}
RUN cat > script.sh <<EOF && echo "a && b; # c" > said
# kept
hello $A $B
EOF
RUN <<END
echo first > two
echo second >> two
END
ENV A=2
RUN touch answer; rm -rf /var/cache/apt /app/answer
RUN ["sh", "-c", "echo $A > list"]
RUN false; echo after > semicolon
RUN apt-get update && apt-get install -y --no-install-recommends bash=5.* || exit 1; \\
    # in between
    sudo apt-get clean && if true; then echo compound > if; fi
COPY ["words.txt", "with blanks/"]
COPY --chmod=600 /words.txt ../app/w.txt
"""
IN_FILES = {
    "if": "compound",
    "list": "2",
    "said": "a && b; # c",
    "script.sh": "# kept\nhello 1 three",
    "semicolon": "after",
    "two": "first\nsecond",
    "w.txt": "one\ntwo",
    "with blanks/words.txt": "one\ntwo",
}


async def test_every_command_of_a_dockerfile_is_executed_as_it_stands(tmp_path: Path):
    write_task(tmp_path / "hello", dockerfile=BUILT)
    environment = HarborEnvironment(HarborOptions(tasks=str(tmp_path)))
    await environment.reset(Task(id="t", environment="harbor", data={"idx": 0}))
    show = 'Action: for f in * */*; do [ -f "$f" ] && echo "=$f=" && cat "$f"; done; stat -c %a w.txt'
    shown = (await environment.step(Message(role="assistant", content=show))).messages[-1].content
    await environment.close()
    assert shown == "".join(f"={name}=\n{text}\n" for name, text in IN_FILES.items()) + "600"


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("RUN pip uninstall -y attrs", "RUN pip uninstall -y attrs"),
        ("RUN pip install -r requirements.txt", "RUN pip install -r requirements.txt"),
        ("RUN pip install $PACKAGES", "RUN pip install $PACKAGES"),
        ("RUN bash -c 'apt-get update && apt-get install -y zathura-xyz'", "the package zathura-xyz"),
        ("RUN echo $(curl https://example.org) > x", "RUN curl https://example.org"),
        ("RUN --mount=type=cache,target=/x true", "RUN --mount=type=cache,target=/x true"),
        ("COPY <<EOF /app/x\nhello\nEOF", "COPY <<EOF /app/x"),
        ('SHELL ["pwsh", "-c"]', 'SHELL ["pwsh", "-c"]'),
        ("RUN <<EOF\n#!/usr/bin/env python3\nprint(1)\nEOF", "RUN <<EOF"),
        ("RUN cat > x <<EOF\nunended", "RUN cat > x <<EOF"),
        ('RUN python -c "print(1 << 2)" && echo "apt-get install x" # don\'t', None),
        ("RUN apt-get update && apt-get install -y curl=8.* || true; pip install -q 'attrs<30' > /dev/null 2>&1", None),
    ],
)
def test_what_a_dockerfile_needs_and_is_not_here_is_named(tmp_path: Path, text: str, missing: str | None):
    assert recipe(tmp_path, text).missing == (() if missing is None else (missing,))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("apt-get update && apt-get install -y curl", {"packages": ("curl",)}),
        ("pip install pytest && pytest /tests", {"requirements": ("pytest",)}),
        ("pip install -U pip 'numpy<2' || true", {"requirements": ("numpy<2",)}),
        ("pip install pytest > /dev/null 2>&1", {"requirements": ("pytest",)}),
        ("if ! which uv; then uv pip install --system pytest; fi", {"requirements": ("pytest",)}),
        ("pip install -r /tests/requirements.txt", {"requirements": ("attrs==24.2.0", "inflection")}),
        ("cd /tests && pip install -r requirements.txt", {"requirements": ("attrs==24.2.0", "inflection")}),
        ("pip install -r requirements.txt", {"missing": ("pip install -r requirements.txt",)}),
        ("uvx -p 3.13 -w attrs ruff@0.4.1 x", {"python": "3.13", "requirements": ("attrs", "ruff==0.4.1")}),
        ("uvx --from 'pytest==8.0' py.test", {"requirements": ("pytest==8.0",)}),
        ("uv run --with-requirements /tests/requirements.txt x", {"requirements": ("attrs==24.2.0", "inflection")}),
        ("uvx --overrides x pytest", {"missing": ("uvx --overrides",), "requirements": ("x",)}),
        ("uv sync", {"missing": ("uv sync",)}),
        ("cat > x <<'EOF'\npip install don't\nEOF\nuv add attrs", {"requirements": ("attrs",)}),
        ("pip install -e /app", {"missing": ("pip install -e /app",)}),
        ("# pip install x\necho 'pip install y' # pip install z", {}),
    ],
)
def test_what_a_test_script_needs(tmp_path: Path, text: str, expected: dict[str, Any]):
    missing = tuple(f"{what} (tests/test.sh)" for what in expected.get("missing", ()))
    assert needs(tmp_path, f"#!/bin/bash\n{text}\n") == TestNeeds.model_validate({**expected, "missing": missing})


def test_tests_without_what_they_install_are_no_verdict(tmp_path: Path):
    folder = write_task(tmp_path / "hello", tests="#!/bin/bash\nbash /tests/prepare.sh\n")

    def ask(command: str) -> None:
        (folder / "tests" / "prepare.sh").write_text(f"{command} || true\necho 0 > /logs/verifier/reward.txt\n")

    ask("pip install no-such-package-1")
    container = HarborContainer(read_task(folder), tmp_path / "place")
    assert container.task.missing == ()
    (tmp_path / "place").mkdir()
    container.build()
    with pytest.raises(BadEnvironmentError, match="need what is not here: pip install no-such-package-1"):
        judge(container)
    ask("apt-get install -y zathura-xyz; uv sync; uvx --overrides x pytest; uvx no-such-tool; pip uninstall x")
    asked = "apt-get install zathura-xyz, uv sync , uv --overrides, uvx no-such-tool, pip uninstall x"
    with pytest.raises(BadEnvironmentError, match=f"need what is not here: {asked}"):
        verify(container)
    ask("uv venv; source .venv/bin/activate; uv pip install pip; apt-get install -y bash; python3 -m pip install wheel")
    assert verify(container)[0] == 0.0
    container.close()
