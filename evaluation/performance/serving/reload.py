"""Reloading adapters under load: ``python -m evaluation.performance.serving.reload [--model PATH]``.

Starts the embedded server in a process of its own, keeps it busy with concurrent clients, and publishes fresh adapter
versions meanwhile: write, load, first token, switch the clients over, unload the old one. Prints a table, and the same
figures as one JSON line. Without ``--model`` a tiny random model is used. Ends with an error if any request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from evaluation.performance.serving.load import Load, keep_asking
from evaluation.performance.serving.random_weights import AdapterWriter, tiny_model

PROMPT_WORDS = 150
ANSWER_TOKENS = 32


@contextmanager
def server(model: Path, *options: str) -> Iterator[str]:
    """Run ``openhands-rl serve`` on a free port; yields its base URL."""
    command = [sys.executable, "-m", "openhands_rl_plugin.cli", "serve", "--model", str(model), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            address = next((line for line in lines if " at http" in line), None)
            if address is None:
                raise SystemExit("error: the server did not start; its own message is above")
            yield address.split(" at ")[1].split("/v1")[0]
        finally:
            process.terminate()


def request(model: str, salt: str) -> dict[str, object]:
    """A request of ``PROMPT_WORDS`` words that no other shares, for exactly ``ANSWER_TOKENS`` tokens."""
    words = f"{salt} " + "red mug sea the buy " * (PROMPT_WORDS // 5)
    messages = [{"role": "user", "content": words}]
    return {"model": model, "messages": messages, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}


async def first_token(client: httpx.AsyncClient, model: str) -> None:
    """Return when the first token sampled with ``model`` has arrived."""
    body = request(model, "first") | {"stream": True, "return_token_ids": True}
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"error: {model} is not served: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("data: {") and any("token_ids" in c for c in json.loads(line[6:])["choices"]):
                return


async def change(client: httpx.AsyncClient, verb: str, name: str, path: Path | None = None) -> None:
    """Load or unload an adapter."""
    body = {"lora_name": name} | ({"lora_path": str(path)} if path else {})
    response = await client.post(f"/v1/{verb}_lora_adapter", json=body)
    if response.status_code != 200:
        raise SystemExit(f"error: {verb} {name}: {response.status_code} {response.text}")


async def measure(url: str, writer: AdapterWriter, *, clients: int, reloads: int) -> dict[str, float]:
    """Publish ``reloads`` versions under the load of ``clients``. Times are in seconds."""
    load = Load("version-v000000")
    serving: list[float] = []
    unloading: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await change(client, "load", load.model, writer.write(load.model))
        started = time.perf_counter()
        # Each asks with prompts of its own.
        asking = [
            asyncio.create_task(
                keep_asking(
                    client,
                    load,
                    "/v1/chat/completions",
                    lambda model, number=number: request(model, f"{number} {load.answers}"),
                    ANSWER_TOKENS,
                )
            )
            for number in range(clients)
        ]
        await asyncio.sleep(1)
        for version in range(1, reloads + 1):
            name = f"version-v{version:06d}"
            path = await asyncio.to_thread(writer.write, name)
            written = time.perf_counter()
            await change(client, "load", name, path)
            await first_token(client, name)
            serving.append(time.perf_counter() - written)
            old, load.model = load.model, name
            switched = time.perf_counter()
            await change(client, "unload", old)
            unloading.append(time.perf_counter() - switched)
        load.stopped = True
        await asyncio.gather(*asking)
        seconds = time.perf_counter() - started
    for failure in load.failures[:5]:
        print(f"failed: {failure}", file=sys.stderr)
    return {
        "reloads": reloads,
        "concurrent clients": clients,
        "requests answered": load.answers,
        "requests failed": len(load.failures),
        "versions that answered": len(load.versions),
        "file written to first token, median s": statistics.median(serving),
        "file written to first token, longest s": max(serving),
        "unloading (waits for the last request), median s": statistics.median(unloading),
        "tokens sampled a second meanwhile": load.answers * ANSWER_TOKENS / seconds,
    }


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of a Hugging Face model (default: a tiny random one)")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--reloads", type=int, default=20)
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory(prefix="reload-benchmark-") as scratch:
        model = options.model or tiny_model(Path(scratch) / "model")
        writer = AdapterWriter(model, Path(scratch))
        with suppress(KeyboardInterrupt), server(model, "--adapters", scratch) as url:
            figures = asyncio.run(measure(url, writer, clients=options.clients, reloads=options.reloads))
            report(model, figures)
            if figures["requests failed"]:
                raise SystemExit(1)


def report(model: Path, figures: dict[str, float]) -> None:
    """A table for people, a JSON line for programs."""
    table = Table("figure", "value", title=f"adapter versions published to {model.name} under load")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.2f}" if isinstance(value, float) else f"{value:,}")
    Console().print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
