"""Measures redaction: planted secrets that are gone, source files and lines that are touched, and speed.

python -m evaluation.performance.secrets.measure --seed 7 --files 2000
"""

from __future__ import annotations

import argparse
import random
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from evaluation.performance.secrets.planted import FORMS, PLACES, left_of, planted
from openhands_rl_plugin.core.redaction import REDACTED, redact_text
from openhands_rl_plugin.core.secrets import find_secrets

_MOST_BYTES = 200_000


def main() -> None:
    """Print the figures; ``--show`` prints what is left and what is touched."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of the values and of the choice of files")
    parser.add_argument("--values", type=int, default=200, help="values of each form")
    parser.add_argument("--files", type=int, default=2000, help="source files of the installed packages; 0: none")
    parser.add_argument("--sources", type=Path, default=Path(sysconfig.get_path("purelib")), help="their folder")
    parser.add_argument(
        "--endings", nargs="+", default=[".py", ".pyi", ".js", ".json", ".md", ".txt", ".toml", ".html"]
    )
    parser.add_argument("--show", type=int, default=0, help="examples to print")
    args = parser.parse_args()
    measure_planted(args.seed, args.values, args.show)
    if args.files:
        measure_sources(sources(args.sources, tuple(args.endings), args.files, args.seed), args.show)


def measure_planted(seed: int, values: int, show: int) -> float:
    """Print and return the share of planted secrets of which nothing is left."""
    total: Counter[str] = Counter()
    left: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for one in planted(seed, values):
        total.update((one.form, one.place, "all"))
        if left_of(one.secret, redact_text(one.text)):
            left.update((one.form, one.place, "all"))
            examples.setdefault(f"{one.form} in {one.place}", one.text)
    share = 1 - left["all"] / total["all"]
    print(f"planted: {total['all']:,} ({len(FORMS)} forms x {values} values x {len(PLACES)} places that can hold them)")
    print(f"gone: {100 * share:.2f} %")
    for name, count in left.most_common():
        if name != "all":
            print(f"  left {count:6,} of {total[name]:6,}: {name}")
    for name, text in list(examples.items())[:show]:
        print(f"  {name}: {text!r}")
    return share


def sources(folder: Path, endings: tuple[str, ...], count: int, seed: int) -> list[tuple[Path, str]]:
    """A choice of the text files below ``folder``."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in endings and path.is_file())
    random.Random(seed).shuffle(files)
    return [*_read(files, count)]


def _read(files: list[Path], count: int) -> Iterator[tuple[Path, str]]:
    found = 0
    for path in files:
        if found < count and 0 < path.stat().st_size <= _MOST_BYTES:
            try:
                yield path, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            found += 1


def measure_sources(files: list[tuple[Path, str]], show: int) -> float:
    """Print and return the share of files that redaction touches."""
    started = time.process_time()
    spans = [(path, text, find_secrets(text)) for path, text in files]
    seconds = time.process_time() - started
    size = sum(len(text) for _, text in files)
    touched = [(path, text, found) for path, text, found in spans if found]
    causes = Counter(_cause(text, start) for _, text, found in touched for start, _ in found)
    share = 100 * len(touched) / len(files)
    print(f"source files: {len(files):,}, {size / 1e6:.1f} MB; touched: {len(touched)} ({share:.2f} %)")
    print(f"speed: {size / seconds / 1e6:.1f} MB/s")
    for cause, times in causes.most_common(25):
        print(f"  {times:4} {cause}")
    for path, text, found in touched[:show]:
        for start, end in found[:3]:
            line = text[max(0, start - 60) : start] + REDACTED + "{" + text[start:end] + "}" + text[end : end + 10]
            print(f"  {path.name}: {line!r}")
    return len(touched) / len(files)


def _cause(text: str, start: int) -> str:
    """What made it a secret: the word before it."""
    before = text[max(0, start - 40) : start].rstrip(" \t\"'=:>(,").rpartition("\n")[2]
    words = [word for word in "".join(c if c.isalnum() or c in "_-." else " " for c in before).split() if word]
    return words[-1].lower() if words else "shape alone"


if __name__ == "__main__":
    main()
