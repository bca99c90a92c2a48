"""Divides new sessions between the version in use and a candidate, by a file that whoever tries candidates writes.

The file is ``{"stable": "shop-v000003", "candidate": "shop-v000004", "share": 0.1}``; ``null``: the model as requested.
A session stays on the version that it began with: only new ones follow a new file.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationError

from openhands_rl_plugin.core.errors import ConfigError, describe
from openhands_rl_plugin.core.files import write_file
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.types import Frozen, PolicyRef
from openhands_rl_plugin.models.gateway.routing import FileState, file_state

_LOG = redacting_logger(__name__)
_LONGEST = 65536
_MOST_GONE = 1000


def _versioned(name: str) -> str:
    # Any other name could not be told from the model as requested when a stored session is continued.
    if PolicyRef.from_served_name("", name).adapter is None:
        raise ValueError(f"{name!a:.80} has to be the name of an adapter's version, such as shop-v000007")
    return name


VersionName = Annotated[str, Field(max_length=200), AfterValidator(_versioned)]


class Routing(Frozen):
    """The served names of two versions (``None``: the model as requested), and the candidate's part of new sessions.

    ``share``: in [0, 1]. Without a candidate every session is on ``stable``.
    """

    stable: VersionName | None = None
    candidate: VersionName | None = None
    share: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)

    def version_for(self, session: str) -> str | None:
        """The version on which a new session of that name begins.

        The same session, the same answer. With a larger share no session leaves the candidate, and the sessions that
        try one candidate are others than those that try the next.
        """
        if self.candidate is None or _part_of(session, self.candidate) >= self.share:
            return self.stable
        return self.candidate


def write_routing(path: Path, routing: Routing) -> None:
    """Replace the file atomically: a gateway reads the old one or the new one. Raises ``StorageError``."""
    write_file(path, routing.model_dump_json() + "\n")


def read_routing(path: Path) -> Routing:
    """Raises ``ConfigError``, one line, for a file that cannot be read or says something else."""
    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST + 1)
        if len(content) > _LONGEST:
            raise ConfigError(f"{path}: is longer than {_LONGEST} bytes, so it is no file of openhands-rl's routing")
        return Routing.model_validate_json(content)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {describe(error)}") from error
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(each) for each in problem["loc"])
        raise ConfigError(f"{path}: {where + ': ' if where else ''}{problem['msg']}") from error


class TrafficSplit:
    """Which version each session is on. The file is read again when it has changed.

    Without a file, requests are sent as they are until there is one. One that becomes unusable changes nothing. Raises
    ``ConfigError`` when it is unusable from the start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.expanduser()
        self._gone: set[str] = set()
        self._routing = Routing()
        self._state = self._seen()
        if self._state is None:
            _LOG.warning("%s does not exist yet: until it does, requests go to the model that they ask for", path)
        else:
            self._routing = read_routing(self._path)

    def begin(self, session: str) -> str | None:
        """The version for a new session; ``None``: the model as requested."""
        return self._now().version_for(session)

    def instead_of(self, gone: str) -> str | None:
        """The version for a session whose version the model server no longer has; the first time that is logged."""
        stable = self._now().stable
        other = stable if stable != gone else None
        if gone not in self._gone:
            if len(self._gone) >= _MOST_GONE:
                self._gone.clear()
            self._gone.add(gone)
            _LOG.warning("the model server has no %s: its sessions go on with %s", gone, other or "the model asked for")
        return other

    def _now(self) -> Routing:
        state = self._seen()
        if state != self._state:
            self._state = state
            try:
                self._routing = read_routing(self._path)
            except ConfigError as error:
                _LOG.warning("%s; sessions are routed as before", error)
        return self._routing

    def _seen(self) -> FileState | None:
        try:
            return file_state(self._path)
        except OSError:
            return (0, 0, 0)  # reading it says what is wrong


def began_with(policy: PolicyRef) -> str | None:
    """The version of a session's first answer; ``None``: it was the model as requested."""
    return policy.served_name if policy.adapter is not None else None


def _part_of(session: str, candidate: str) -> float:
    """A number in [0, 1), uniform over sessions and independent between candidates."""
    digest = hashlib.sha256(f"{candidate}\0{session}".encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53  # 53 bits: rounding must not make it 1.0
