"""Publishing to a real vLLM under load: ``python -m evaluation.performance.serving.publish_vllm [--model PATH]``.

Starts vLLM on this machine's processor, or with ``--device cuda`` on its GPU (see ``vllm_server.py``), keeps it busy
with concurrent clients, and publishes fresh adapter versions through ``AdapterPublisher`` meanwhile: checksum, load,
canary, pointer, unload the stale ones. The canary's logprobs come from another implementation, the embedded generation
core. At the end a version with other weights than its canary, one whose file is damaged, and one that vLLM cannot read
are published too, and must be refused with the old version serving on. Prints a table, and the same figures as one JSON
line. Ends with an error if a request failed or a corrupted adapter was taken. Without ``--model`` a tiny random model
is used.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import httpx
import torch

from evaluation.performance.serving.load import Load, keep_asking
from evaluation.performance.serving.random_weights import AdapterWriter, tiny_model
from evaluation.performance.serving.reload import report
from evaluation.performance.serving.vllm_server import NAME, NoVLLMError, running_vllm, vllm_python
from openhands_rl_plugin.core.errors import PublishError
from openhands_rl_plugin.core.types import Adapter, Probe
from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher
from openhands_rl_plugin.models.adapters.store import WEIGHTS_FILE, AdapterStore
from openhands_rl_plugin.models.generator.config import GeneratorConfig
from openhands_rl_plugin.models.generator.generator import Generator
from openhands_rl_plugin.models.generator.sequence import DecodingParams
from openhands_rl_plugin.training.policies.packed_model import PROBE_TOLERANCE

PROMPT_TOKENS = 48
ANSWER_TOKENS = 8
CANARY = tuple(range(3, 51))
MAX_DIFFERENCE = 0.01
"""Nats: the trainer's bound for a float32 model. bfloat16 moves the tiny one by 0.002."""
ADAPTER = "version"
# Enough for any two versions to differ by more than the bound.
SIZE = 0.05


def prompt(number: int) -> list[int]:
    """Ids that no other request shares from its first token on."""
    return [10 + number % 7, *((number * 31 + 17 * at) % 200 + 5 for at in range(PROMPT_TOKENS - 1))]


def request(model: str, number: int) -> dict[str, object]:
    """A request for exactly ``ANSWER_TOKENS`` tokens."""
    return {"model": model, "prompt": prompt(number), "max_tokens": ANSWER_TOKENS, "ignore_eos": True}


async def first_token(client: httpx.AsyncClient, model: str) -> None:
    """Return when the first token sampled with ``model`` has arrived."""
    body = request(model, 10_000) | {"stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"error: {model} is not served: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                return


def versions(
    store: AdapterStore, writer: AdapterWriter, model: Path, number: int, *, device: str, bound: float
) -> list[tuple[Adapter, Probe]]:
    """Adapters on disk, each with its canary and the ``bound`` of the mean difference from it, in nats."""
    made: list[tuple[Adapter, Probe]] = []
    dtype = "float32" if device == "cpu" else "bfloat16"
    config = GeneratorConfig(model=str(model), dtype=dtype, device=device, threads=2, max_adapters=number)
    with Generator(config) as reference:
        for index in range(number):
            source = writer.write(f"source-{index}")
            adapter = store.create(ADAPTER, _copy(source), base_model=NAME)
            reference.load_adapter(adapter.name, source)
            params = DecodingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
            seen = reference.generate(CANARY, params, adapter=adapter.name).prompt or ()
            logprobs = tuple(each.logprob for each in seen[1:] if each is not None)
            made.append((adapter, Probe(token_ids=CANARY, logprobs=logprobs, max_difference=bound)))
    return made


def _copy(source: Path) -> Callable[[Path], None]:
    def write(target: Path) -> None:
        shutil.copytree(source, target, dirs_exist_ok=True)

    return write


async def measure(
    url: str, store: AdapterStore, made: list[tuple[Adapter, Probe]], *, clients: int, requests: int
) -> dict[str, float]:
    """Publish all but the last two of ``made``, spread over the requests. Times are in seconds."""
    *live, spare, last = made
    serving: list[float] = []
    publishing: list[float] = []
    differences: list[float] = []
    async with (
        httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client,
        AdapterPublisher(url, store) as publisher,
    ):
        await publisher.publish(*live[0])
        await first_token(client, live[0][0].name)  # vLLM's first answer takes seconds, whatever it is asked
        load = Load(live[0][0].name, requests)
        started = time.perf_counter()
        numbers = count()

        def ask(model: str) -> dict[str, object]:
            return request(model, next(numbers))

        asking = [
            asyncio.create_task(keep_asking(client, load, "/v1/completions", ask, ANSWER_TOKENS))
            for _ in range(clients)
        ]
        for number, (adapter, probe) in enumerate(live[1:], start=1):
            while load.answers < requests * number // (len(live) + 1) and not load.done:
                await asyncio.sleep(0.005)
            begun = time.perf_counter()
            published = await publisher.publish(adapter, probe)
            publishing.append(time.perf_counter() - begun)
            await first_token(client, adapter.name)
            serving.append(time.perf_counter() - begun)
            differences.append(published.difference or 0.0)
            load.model = adapter.name
        refused = await corrupted(publisher, store, spare, last)
        in_use = store.current(ADAPTER)
        await asyncio.gather(*asking)
        seconds = time.perf_counter() - started
        await first_token(client, load.model)
    for failure in load.failures[:5]:
        print(f"failed: {failure}")
    if in_use is None or in_use.name != load.model:
        raise SystemExit("error: a corrupted adapter took the place of the one in use")
    return {
        "reloads": len(serving),
        "concurrent clients": clients,
        "requests answered": load.answers,
        "requests failed": len(load.failures),
        "versions that answered": len(load.versions),
        "file to first token, median s": statistics.median(serving),
        "file to first token, longest s": max(serving),
        "publishing, median s": statistics.median(publishing),
        "canary: largest difference, nats": max(differences),
        "corrupted adapters refused, of 3": refused,
        "tokens sampled a second meanwhile": load.answers * ANSWER_TOKENS / seconds,
    }


async def corrupted(
    publisher: AdapterPublisher, store: AdapterStore, spare: tuple[Adapter, Probe], last: tuple[Adapter, Probe]
) -> int:
    """Try to publish three wrong versions; the number that was refused."""

    def cut(target: Path) -> None:
        _copy(Path(spare[0].path))(target)
        (target / WEIGHTS_FILE).write_bytes((Path(spare[0].path) / WEIGHTS_FILE).read_bytes()[:1000])

    unreadable = store.create(ADAPTER, cut, base_model=NAME)
    weights = Path(last[0].path) / WEIGHTS_FILE
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    refused = 0
    for adapter, probe in ((spare[0], last[1]), last, (unreadable, last[1])):
        try:
            await publisher.publish(adapter, probe)
        except PublishError:
            refused += 1
    return refused


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of a Hugging Face model (default: a tiny random one)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where vLLM runs (default: cpu)")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--reloads", type=int, default=20)
    parser.add_argument("--requests", type=int, default=1000)
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # So that vLLM, which is in a session of its own, ends with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="publish-benchmark-") as scratch:
        folder = Path(scratch)
        model = options.model.expanduser() if options.model else tiny_model(folder / "model", heads=2)
        store = AdapterStore(folder / "adapters")
        device = options.device
        bound = MAX_DIFFERENCE if device == "cpu" or not options.model else PROBE_TOLERANCE[torch.bfloat16]
        try:
            python = vllm_python(device)
            writer = AdapterWriter(model, folder, size=SIZE)
            made = versions(store, writer, model, options.reloads + 3, device=device, bound=bound)
            with running_vllm(python, model, log=folder / "vllm.log", device=device) as url:
                figures = asyncio.run(measure(url, store, made, clients=options.clients, requests=options.requests))
        except NoVLLMError as error:
            raise SystemExit(f"error: {error}") from error
    report(model, figures)
    if figures["requests failed"] or figures["corrupted adapters refused, of 3"] != 3:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
