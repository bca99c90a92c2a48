"""Stores sessions with another project's store, run by that project's Python; nothing of this one is imported.

    PYTHON evaluation/performance/storage/peer.py {rllm,tinker} FOLDER SESSIONS TURNS CONCURRENCY

Prints one line of JSON. Each store gets what it is made for: the whole prompt with every call. rllm's keeps a rollback
journal with ``synchronous=NORMAL``, tinker's a write-ahead log with ``synchronous=FULL``, and no messages.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from load import Turn, prompts, session  # pyright: ignore[reportMissingImports]


def rllm(file: Path, sessions: list[list[Turn]], concurrency: int) -> tuple[float, float]:
    """``SqliteTraceStore.store_trace`` from several tasks; then all sessions are read."""
    from rllm_model_gateway.models import TraceRecord  # pyright: ignore[reportMissingImports]
    from rllm_model_gateway.store.sqlite_store import SqliteTraceStore  # pyright: ignore[reportMissingImports]

    def record(number: int, at: int, turn: Turn, prompt: list[int], messages: list[Any]) -> dict[str, Any]:
        return TraceRecord(
            trace_id=f"{number}-{at}",
            session_id=str(number),
            model="policy",
            messages=messages,
            prompt_token_ids=prompt,
            response_message={"role": "assistant", "content": turn.said},
            completion_token_ids=list(turn.said_ids),
            logprobs=list(turn.logprobs),
            finish_reason="stop",
        ).model_dump()

    records = []
    for number, turns in enumerate(sessions):
        messages: list[Any] = []
        for at, (turn, prompt) in enumerate(zip(turns, prompts(turns), strict=True)):
            messages = [*messages, {"role": "user", "content": turn.read}]
            records.append(record(number, at, turn, prompt, messages))
            messages = [*messages, {"role": "assistant", "content": turn.said}]

    async def run() -> tuple[float, float]:
        store = SqliteTraceStore(str(file))
        waiting = iter(records)

        async def work() -> None:
            for each in waiting:
                await store.store_trace(each["trace_id"], each["session_id"], each)

        started = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(concurrency)))
        writing = time.perf_counter() - started
        started = time.perf_counter()
        read = [len(await store.get_session_traces(str(number))) for number in range(len(sessions))]
        reading = time.perf_counter() - started
        await store.close()
        assert sum(read) == len(records)
        return writing, reading

    return asyncio.run(run())


def tinker(file: Path, sessions: list[list[Turn]], concurrency: int) -> tuple[float, float | None]:
    """``CaptureDB.ingest_wire`` from several threads."""
    from tinker_cookbook.capture.store.db import CaptureDB  # pyright: ignore[reportMissingImports]

    rows = [
        {
            "run_id": "run",
            "sampling_session_id": str(number),
            "seq_id": at,
            "sample_idx": 0,
            "created_at": 0.0,
            "prompt_tokens": prompt,
            "sampled_tokens": list(turn.said_ids),
            "logprobs": list(turn.logprobs),
        }
        for number, turns in enumerate(sessions)
        for at, (turn, prompt) in enumerate(zip(turns, prompts(turns), strict=True))
    ]
    database = CaptureDB(file)
    with ThreadPoolExecutor(concurrency) as threads:
        started = time.perf_counter()
        results = list(threads.map(lambda row: database.ingest_wire([row]), rows))
        writing = time.perf_counter() - started
    database.close()
    assert sum(result.inserted for result in results) == len(rows)
    return writing, None


STORES: dict[str, Callable[[Path, list[list[Turn]], int], tuple[float, float | None]]] = {
    "rllm": rllm,
    "tinker": tinker,
}


def main() -> None:
    """Store, read, print."""
    name, folder, *numbers = sys.argv[1:]
    count, turns, concurrency = map(int, numbers)
    writing, reading = STORES[name](
        Path(folder) / "store.db", [session(seed, turns) for seed in range(count)], concurrency
    )
    size = sum(path.stat().st_size for path in Path(folder).iterdir())
    calls = count * turns
    scan = None if reading is None else calls / reading
    print(json.dumps({"appends": calls / writing, "bytes": size / calls, "scan": scan}))


if __name__ == "__main__":
    main()
