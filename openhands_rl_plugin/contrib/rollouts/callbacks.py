"""``callback_url``: a finished task is posted to whoever submitted it, at least once; who misses it asks for it."""

from __future__ import annotations

import asyncio
import time

import httpx

from openhands_rl_plugin.contrib.rollouts.queue import JobQueue
from openhands_rl_plugin.contrib.rollouts.requests import TaskRequest
from openhands_rl_plugin.core.errors import describe
from openhands_rl_plugin.core.redaction import redacting_logger

_LOG = redacting_logger(__name__)
_DELAYS = (2.0, 10.0, 60.0, 300.0)
_AT_ONCE = 8


async def send_due(queue: JobQueue, client: httpx.AsyncClient) -> None:
    """Send what is due, a few at a time. Raises ``StorageError``."""
    due = await asyncio.to_thread(_due, queue)
    await asyncio.gather(*(_send(queue, client, *each) for each in due))


def _due(queue: JobQueue) -> list[tuple[str, str, int]]:
    with queue.database.reading() as db:
        rows = db.execute(
            "SELECT task_id, request, callback_tries FROM tasks WHERE callback_at <= ? ORDER BY callback_at LIMIT ?",
            (time.time(), _AT_ONCE),
        ).fetchall()
    return [(row[0], TaskRequest.model_validate_json(row[1]).callback_url or "", row[2]) for row in rows]


async def _send(queue: JobQueue, client: httpx.AsyncClient, task_id: str, url: str, tries: int) -> None:
    body = await asyncio.to_thread(queue.task, task_id)
    again: float | None = None
    try:
        answer = await client.post(url, content=body or "{}", headers={"content-type": "application/json"})
        answer.raise_for_status()
        await asyncio.to_thread(queue.note_collected, task_id)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        again = time.time() + _DELAYS[tries] if tries < len(_DELAYS) else None
        _LOG.warning("task %s: its callback did not take it (%s)", task_id, describe(error))
    await asyncio.to_thread(_note, queue, task_id, again)


def _note(queue: JobQueue, task_id: str, again: float | None) -> None:
    with queue.database.writing() as db:
        db.execute(
            "UPDATE tasks SET callback_at = ?, callback_tries = callback_tries + 1 WHERE task_id = ?", (again, task_id)
        )
