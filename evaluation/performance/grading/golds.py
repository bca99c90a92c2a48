"""Gold patches of published rows by the local back end, with the guard, and patches that change nothing.

Each instance is graded three times: with its gold patch, with an empty one, and with one that adds a note nobody reads.
``--out`` gets a line for each instance. A repeated command skips instances that have a line. Without ``--ids`` or
``--each`` all rows are graded.

    python -m evaluation.performance.grading.golds rows.jsonl --mirror ./mirrors --out golds.jsonl --each 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from openhands_rl_plugin.core.errors import RLError
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.evals.swe.backends import LocalBackend
from openhands_rl_plugin.evals.swe.guard import RewardHackGuard
from openhands_rl_plugin.evals.swe.instances import Instance, PatchVerdict, read_instances, read_rows

NOTHING = """\
diff --git a/a_note_of_nobody.md b/a_note_of_nobody.md
new file mode 100644
--- /dev/null
+++ b/a_note_of_nobody.md
@@ -0,0 +1 @@
+nothing of importance
"""


def chosen(rows: Sequence[Instance], ids: Sequence[str], each: int) -> list[Instance]:
    """The rows with these ids, in the order of the ids; or the first ``each`` of every repository, in turns."""
    if ids:
        known = {row.instance_id: row for row in rows}
        return [known[name] for name in ids]
    by_repository: dict[str, list[Instance]] = defaultdict(list)
    for row in rows:
        by_repository[row.repo].append(row)
    most = max(map(len, by_repository.values())) if each == 0 else each
    return [group[at] for at in range(most) for group in by_repository.values() if at < len(group)]


async def measure(backend: LocalBackend, row: Instance, logs: Path, timeout: float) -> JsonObject:
    """The line of one instance."""
    began = time.monotonic()
    try:
        await backend.prepare(row)
    except RLError as error:
        return {"instance_id": row.instance_id, "repo": row.repo, "not_set_up": str(error)[:400]}
    ready = time.monotonic()
    verdicts: dict[str, PatchVerdict] = {}
    for name, patch in (("gold", row.patch), ("empty", ""), ("nothing", NOTHING)):
        place = logs / row.instance_id / name
        verdicts[name] = await backend.grade(row, patch, logs=place, timeout=timeout)
    summaries: JsonObject = {name: summary_of(verdict) for name, verdict in verdicts.items()}
    return {"instance_id": row.instance_id, "repo": row.repo, "set_up": round(ready - began, 1), **summaries}


def summary_of(verdict: PatchVerdict) -> JsonObject:
    """A verdict's counts and reason, with the names of at most eight failed tests."""
    failed = (*verdict.fail_to_pass.failure, *verdict.pass_to_pass.failure)
    return {
        "kind": verdict.kind.value,
        "reason": verdict.reason,
        "flags": list(verdict.flagged),
        "passed": len(verdict.fail_to_pass.success) + len(verdict.pass_to_pass.success),
        "failed": len(failed),
        "some_failed": list(failed[:8]),
        "seconds": round(verdict.seconds, 1),
    }


def table(lines: Sequence[JsonObject]) -> Iterator[str]:
    """A line for each repository, then one for each gold patch that is not resolved."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for line in lines:
        count = counts[str(line["repo"])]
        count["rows"] += 1
        for name in ("gold", "empty", "nothing"):
            verdict = line.get(name)
            count[name] += isinstance(verdict, dict) and verdict["kind"] == "resolved"
    for repo, count in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        resolved = ", ".join(f"{name} {count[name]}" for name in ("gold", "empty", "nothing"))
        yield f"{repo:<28} {count['rows']:>3} rows, resolved: {resolved}"
    for line in lines:
        gold = line.get("gold")
        if not isinstance(gold, dict) or gold["kind"] != "resolved":
            yield f"{line['instance_id']}: {line.get('not_set_up') or gold}"


async def run(args: argparse.Namespace) -> None:
    """Grade what has no line yet and print the table."""
    guard = None if args.no_guard else RewardHackGuard()
    backend = LocalBackend(cache=args.cache, mirror=args.mirror, guard=guard)
    await backend.check()
    done = {str(line["instance_id"]) for line in read_rows(args.out)} if args.out.exists() else set()
    for row in chosen(read_instances(args.rows), args.ids, args.each):
        if row.instance_id not in done:
            line = await measure(backend, row, args.out.with_suffix(".logs"), args.timeout)
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line)[:300], flush=True)
    print("\n".join(table(list(read_rows(args.out)))))


def main() -> None:
    """Read the options and grade."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--mirror", type=Path, required=True)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ids", nargs="*", default=[])
    parser.add_argument("--each", type=int, default=0, help="the first N rows of every repository")
    parser.add_argument("--no-guard", action="store_true", help="grade by the tests alone, without the guard")
    parser.add_argument("--timeout", type=float, default=1800.0)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
