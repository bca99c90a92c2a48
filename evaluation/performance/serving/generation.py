"""How fast the generation core reads and writes: ``python -m evaluation.performance.serving.generation --model PATH``.

Reading: tokens a second of one long prompt. Writing: sampled tokens a second, all sequences together, once every
sequence has its context. Each with the bare model and with a LoRA adapter. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from evaluation.performance.serving.random_weights import AdapterWriter, tiny_model
from openhands_rl_plugin.models.generator.config import GeneratorConfig
from openhands_rl_plugin.models.generator.generator import Generator
from openhands_rl_plugin.models.generator.sequence import DecodingParams

WRITTEN = 48


def prompt(random_: random.Random, generator: Generator, tokens: int) -> list[int]:
    """Random token ids that no earlier prompt begins with."""
    return [random_.randrange(generator.model.vocabulary) for _ in range(tokens)]


def reading(generator: Generator, adapter: str | None, tokens: int) -> float:
    """Prompt tokens a second of one request; the best of three."""
    random_, seconds = random.Random(1), []
    for _ in range(3):
        ids = prompt(random_, generator, tokens)
        started = time.perf_counter()
        generator.generate(ids, DecodingParams(max_tokens=1), adapter=adapter)
        seconds.append(time.perf_counter() - started)
    return tokens / min(seconds)


def writing(generator: Generator, adapter: str | None, batch: int, context: int) -> float:
    """Sampled tokens a second of ``batch`` sequences, from the moment when all of them have begun."""
    random_ = random.Random(batch)
    times: list[list[float]] = [[] for _ in range(batch)]
    # While the last prompts are read, the first sequences write; enough for all to overlap.
    params = DecodingParams(max_tokens=WRITTEN + 2 * batch, ignore_eos=True)
    tickets = [
        generator.submit(
            prompt(random_, generator, context),
            params,
            adapter=adapter,
            on_delta=lambda *_, mine=mine: mine.append(time.perf_counter()),  # pyrefly: ignore[missing-attribute]
        )
        for mine in times
    ]
    for ticket in tickets:
        ticket.result()
    begun, ended = max(mine[0] for mine in times), min(mine[-1] for mine in times)
    sampled = sum(begun < at <= ended for mine in times for at in mine)
    return sampled / (ended - begun)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of a Hugging Face model (default: a tiny random one)")
    parser.add_argument("--context", type=int, default=400, help="prompt tokens of each sequence (default: 400)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="generation-benchmark-") as scratch:
        model = options.model or tiny_model(Path(scratch) / "model")
        config = GeneratorConfig(model=str(model), max_batch=max(options.batch), threads=options.threads)
        with Generator(config) as generator:
            generator.load_adapter("lora", AdapterWriter(model, Path(scratch)).write("lora"))
            for adapter in (None, "lora"):
                label = "LoRA" if adapter else "bare"
                figures[f"{label}: prompt tokens read a second"] = reading(generator, adapter, 1024)
                for batch in options.batch:
                    name = f"{label}: tokens sampled a second, batch {batch}"
                    figures[name] = writing(generator, adapter, batch, options.context)
    table = Table("figure", "value", title=f"{model.name}, contexts of {options.context} tokens")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.0f}")
    Console().print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
