"""What a patch names, whatever its hunks hold."""

from __future__ import annotations

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openhands_rl_plugin.evals.swe.patches import MAX_PATCH, added_files, changed_files, refusal, restored_files

# Lines that look like a patch's own when they are inside one.
lines = st.lists(
    st.sampled_from(["-- x", "++ b/y", "--- a/x", "+++ b/x", "@@ -1 +1 @@", "", "x", "diff --git a/q b/q"])
)
names = st.from_regex(r"[a-z]{1,5}(/[a-z]{1,5}){0,2}\.py", fullmatch=True)


def file_patch(name: str, old: list[str] | None, new: list[str] | None) -> str:
    before, after = (f"a/{name}" if old is not None else "/dev/null"), (f"b/{name}" if new is not None else "/dev/null")
    lines = difflib.unified_diff(old or [], new or [], before, after, lineterm="")
    return f"diff --git a/{name} b/{name}\n" + "".join(f"{line}\n" for line in lines)


@given(st.dictionaries(names, st.tuples(st.none() | lines, st.none() | lines), min_size=1, max_size=4))
def test_names_are_found_whatever_the_hunks_hold(files: dict[str, tuple[list[str] | None, list[str] | None]]) -> None:
    changed = {name: pair for name, pair in files.items() if (pair[0] or []) != (pair[1] or [])}
    patch = "".join(file_patch(name, *pair) for name, pair in files.items())
    assert changed_files(patch) == tuple(files)
    assert restored_files(patch) == tuple(name for name, (old, _) in changed.items() if old is not None)
    assert added_files(patch) == tuple(name for name, (old, _) in changed.items() if old is None)
    if changed:
        assert refusal(patch) is None


def test_quoted_names() -> None:
    patch = file_patch("plain.py", ["a"], ["b"]).replace(
        "a/plain.py b/plain.py", '"a/\\303\\244 \\"b\\".py" "b/\\303\\244 \\"b\\".py"'
    )
    patch = patch.replace("--- a/plain.py", '--- "a/\\303\\244 \\"b\\".py"').replace(
        "+++ b/plain.py", '+++ "b/\\303\\244 \\"b\\".py"'
    )
    assert changed_files(patch) == ('ä "b".py',) == restored_files(patch)


_CHANGE = "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"


@pytest.mark.parametrize(
    ("patch", "why"),
    [
        ("diff --git a/x b/x\n", "not a patch"),
        ("\ud800", "not text"),
        ("x" * (MAX_PATCH + 1), "16 MiB"),
        (_CHANGE.replace("b/x", "b/sub/.git/config"), "git's own files"),
        (_CHANGE, None),
        ("diff --git a/x b/x\nold mode 100644\nnew mode 100755\n", None),
        ("diff --git a/x b/y\nsimilarity index 100%\nrename from x\nrename to y\n", None),
        ("diff --git a/x b/x\nnew file mode 100644\nindex 0..1\nGIT binary patch\nliteral 1\nIcmZPo\n\n", None),
        (file_patch(".github/x.py", None, ["x"]), None),
    ],
)
def test_what_is_refused(patch: str, why: str | None) -> None:
    found = refusal(patch)
    assert found is None if why is None else why in (found or "")
