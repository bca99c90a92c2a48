"""Episodes as processes of the Python that has OpenHands, for trainers whose own has not."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from openhands_rl_plugin.apps.rollout.program import SECRET, read_episode, rollout_command
from openhands_rl_plugin.apps.rollout.pythons import checked_interpreter
from openhands_rl_plugin.config.rollout import as_trainer_names, options_from_trainer
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.trajectories.exchange.trainers.rollout import PlayedRollout

_AWAY = 5.0
"""Seconds before an episode is played again."""
GRACE = 60.0
"""Seconds that the program has beyond the episode's own limit, to say why it ended."""


class EpisodeProgram:
    """Plays episodes by the options that a trainer's configuration has below ``where``.

    ``said``: the options that the ``trainer`` says itself. ``tries``: how often an episode is played that failed of the
    infrastructure. ``store``: keeps the episodes; without it they go with their process. Raises ``ConfigError`` for
    options that are not there, and for a Python without OpenHands.
    """

    def __init__(
        self,
        given: Mapping[str, object],
        *,
        where: str,
        trainer: str,
        said: frozenset[str],
        tries: int = 2,
        store: str = "",
    ) -> None:
        if tries < 1:
            raise ConfigError(f"{where.removesuffix('options')}tries has to be 1 or more")
        self._named = partial(as_trainer_names, where=where, trainer=trainer, said=said)
        checked = options_from_trainer(given, where, trainer, said)
        self._options = {name: getattr(checked, name) for name in given}
        self._seconds = checked.timeout + GRACE
        self._tries = tries
        self._store = Path(store) if store else None
        self._python = checked_interpreter()

    async def play(
        self,
        task: str,
        base_url: str,
        model: str,
        *,
        base_model: str = "",
        key: str = "none",
        **changes: object,
    ) -> PlayedRollout | str:
        """The episode of ``task``, an id or a row as JSON; or in one line why there is none that may be trained on.

        ``changes``: further options. An episode without reward or token ids is none.
        """
        why = ""
        for number in range(self._tries):
            options = {**self._options, **changes}
            if number:
                await asyncio.sleep(_AWAY)
                if name := options.get("group_id"):
                    # One that failed is stored under its own names, and would be returned.
                    options["group_id"] = f"{name}/again-{number}"
            played = await self._once(task, base_url, model, base_model, key, options)
            if not isinstance(played, str):
                valid = played.reward is not None and played.segments
                return played if valid else "model: the episode has no reward or no token ids"
            why = played
            if not why.startswith("infrastructure: "):
                break
        return why

    async def _once(
        self, task: str, base_url: str, model: str, base_model: str, key: str, options: Mapping[str, object]
    ) -> PlayedRollout | str:
        row = task.lstrip().startswith("{")
        chosen = ("--task", "-" if row else task)
        words = rollout_command(
            self._python, chosen, base_url, model, options, self._store, base_model=base_model, token_ids=True
        )
        played = await run_program(words, task if row else "", key=key, seconds=self._seconds)
        return self._named(played) if isinstance(played, str) else played


async def run_program(words: Sequence[str], given: str, *, key: str, seconds: float) -> PlayedRollout | str:
    """The episode that a program prints which is ``given`` its standard input, or in one line why there is none.

    It and all that it started are killed after ``seconds``, and with the task that waits for it.
    """
    with tempfile.TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(
            *words,
            env={**os.environ, SECRET: key},
            cwd=folder,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            said = await asyncio.wait_for(process.communicate(given.encode()), seconds)
        except TimeoutError:
            return f"infrastructure: the episode's program did not end within {seconds:g} s"
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        return read_episode(process.returncode or 0, *(each.decode(errors="replace") for each in said))
