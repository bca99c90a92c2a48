"""``openhands-rl train`` as several processes, which ``torchrun`` or ``accelerate launch`` has started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from openhands_rl_plugin.core.errors import MissingExtraError

if TYPE_CHECKING:
    from openhands_rl_plugin.training.distributed.ranks import Ranks


def shared[T](ranks: Ranks | None, kind: TypeAdapter[T], make: Callable[[], T]) -> T:
    """What rank 0 makes: the others neither read the store nor judge episodes.

    So all have the same, also from a store that is being written to.
    """
    if ranks is None:
        return make()
    return kind.validate_json(ranks.broadcast_text(kind.dump_json(make()).decode() if ranks.rank == 0 else ""))


@contextmanager
def joined() -> Iterator[Ranks | None]:
    """This process among the others; ``None`` when there are no others. Of several, rank 0 alone speaks."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None
        return
    try:
        from openhands_rl_plugin.models.generator.threads import prepare_threads

        prepare_threads()
        from openhands_rl_plugin.training.distributed.ranks import join_ranks
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "train") from error
    with join_ranks() as ranks:
        if ranks.rank == 0:
            yield ranks
            return
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield ranks
