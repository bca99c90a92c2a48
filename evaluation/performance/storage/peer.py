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
from itertools import pairwise
from pathlib import Path
from typing import Any

from load import Turn, prompts, session
from rllm_model_gateway.models import TraceRecord
from rllm_model_gateway.store.sqlite_store import SqliteTraceStore


def records_of(number: int, turns: list[Turn]) -> list[dict[str, Any]]:
    """A session, a record a turn."""
    records, messages = [], []
    for at, (turn, prompt) in enumerate(zip(turns, prompts(turns), strict=True)):
        messages = [*messages, {"role": "user", "content": turn.read}]
        answer = {"role": "assistant", "content": turn.answer}
        record = TraceRecord(
            trace_id=f"{number}-{at}",
            session_id=str(number),
            model="policy",
            messages=messages,
            prompt_token_ids=prompt,
            response_message=answer,
            completion_token_ids=list(turn.answer_ids),
            logprobs=list(turn.logprobs),
            finish_reason="stop",
        )
        records.append(record.model_dump())
        messages = [*messages, answer]
    return records


async def main(folder: Path, count: int, turns: int, concurrency: int) -> None:
    """``SqliteTraceStore.store_trace`` from several tasks; then all sessions are read."""
    store = SqliteTraceStore(str(folder / "store.db"))
    waiting = iter([record for seed in range(count) for record in records_of(seed, session(seed, turns))])

    async def work() -> None:
        for each in waiting:
            await store.store_trace(each["trace_id"], each["session_id"], each)

    times = [time.perf_counter()]
    await asyncio.gather(*(work() for _ in range(concurrency)))
    times.append(time.perf_counter())
    read = [len(await store.get_session_traces(str(number))) for number in range(count)]
    times.append(time.perf_counter())
    await store.close()
    assert sum(read) == count * turns
    size = sum(path.stat().st_size for path in folder.iterdir()) / sum(read)
    appends, scan = (sum(read) / (after - before) for before, after in pairwise(times))
    print(json.dumps({"appends": appends, "bytes": size, "scan": scan}))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
