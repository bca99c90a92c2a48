"""Memory of ``serve`` while it answers requests with prompts of their own.

    .venv/bin/python -m evaluation.performance.servers.memory --model MODEL --requests 3000

The prefix cache keeps what was computed, up to ``--cache-bytes`` (1 GiB by default), so that memory grows until it is
full: it is measured without that cache, and with one that is full after the first requests.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from evaluation.performance.servers.fuzz import started

_WARM = 2000
_CLIENTS = 4
_MIB = 1024**2


def grown(model: str, folder: Path, cache_bytes: int, requests: int) -> tuple[float, float]:
    """Resident MiB after the first requests, and how much they grew in ``requests`` more."""
    words = ("serve", "--model", model, "--served-model-name", "tiny", "--threads", "1")
    with (
        started("serve", folder, (*words, "--cache-bytes", str(cache_bytes))) as server,
        httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client,
        ThreadPoolExecutor(_CLIENTS) as pool,
    ):

        def ask(number: int) -> int:
            text = " ".join(f"{number} {word}" for word in ("one", "two", "three", "four", "five", "six"))
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "logprobs": True}
            return client.post("/v1/chat/completions", json=body).raise_for_status().status_code

        def resident() -> float:
            lines = client.get("/metrics").text.splitlines()
            return next(float(line.split()[1]) for line in lines if line.startswith("process_resident")) / _MIB

        list(pool.map(ask, range(_WARM)))
        before = resident()
        list(pool.map(ask, range(_WARM, _WARM + requests)))
        return before, resident() - before


def main() -> None:
    """Print a line for each size of the cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a small model")
    parser.add_argument("--requests", type=int, default=3000)
    args = parser.parse_args()
    for cache_bytes in (0, 4 * _MIB):
        with tempfile.TemporaryDirectory(prefix="memory-") as folder:
            before, more = grown(args.model, Path(folder), cache_bytes, args.requests)
        print(json.dumps({"cache_mib": cache_bytes // _MIB, "before_mib": round(before), "grown_mib": round(more, 1)}))


if __name__ == "__main__":
    main()
