"""Stores sessions with rllm's store, run by rllm's Python; nothing of this one is imported.

    PYTHON evaluation/performance/storage/peer.py FOLDER SESSIONS TURNS CONCURRENCY

Prints one line of JSON. The store gets what it is made for: the whole prompt with every call. It keeps a rollback
journal with ``synchronous=NORMAL``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
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


def main() -> None:
    """Store, read, print."""
    folder, *numbers = sys.argv[1:]
    count, turns, concurrency = map(int, numbers)
    sessions = [session(seed, turns) for seed in range(count)]
    writing, reading = rllm(Path(folder) / "store.db", sessions, concurrency)
    size = sum(path.stat().st_size for path in Path(folder).iterdir())
    calls = count * turns
    print(json.dumps({"appends": calls / writing, "bytes": size / calls, "scan": calls / reading}))


if __name__ == "__main__":
    main()
