"""Images of registries, by the OCI distribution specification 1.1 (Docker's HTTP API V2): manifests and blobs, tokens.

What is downloaded is compared with its digest. A layer whose download was cut is continued where it stopped, also by
another process. Credentials are those of ``docker login`` (``auths`` in its ``config.json``); they are sent to their
registry and to the token server that it names, and never stored.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import urlsplit

from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError, InfrastructureError, describe
from openhands_rl_plugin.evals.images.archives import SourceImage, checked_image
from openhands_rl_plugin.evals.images.layers import ImageLimits, too_large
from openhands_rl_plugin.evals.images.manifests import (
    ACCEPTED,
    MOST_OF_JSON,
    Platform,
    check_platform,
    choose,
    digest_of,
    is_index,
    read_config,
    read_json,
    read_manifest,
)
from openhands_rl_plugin.evals.images.references import Reference

if TYPE_CHECKING:
    import httpx

_TIMEOUT, _TRIES, _LONGEST_WAIT = 60.0, 5, 30.0
_CHUNK = 2**18
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')
_HUB_LOGIN = "https://index.docker.io/v1/"
_AGAIN = (429, 500, 502, 503, 504)


class RegistrySource:
    """The image of ``reference``, with layers in ``blobs`` until ``close``. ``address``: a mirror's, which is asked
    instead. Its methods block.
    """

    def __init__(
        self, reference: Reference, wanted: Platform, blobs: Path, limits: ImageLimits, *, address: str = ""
    ) -> None:
        import httpx

        self._reference, self._wanted, self._blobs, self._limits = reference, wanted, blobs, limits
        self._base = _address(address or _default_address(reference.host))
        self._login = _login(reference.host if not address else urlsplit(self._base).netloc)
        self._token = ""
        self._sizes: dict[str, int] = {}
        self._client = httpx.Client(timeout=_TIMEOUT, follow_redirects=True)

    def image(self) -> SourceImage:
        """The image. Raises ``ConfigError``, ``BadEnvironmentError`` and ``InfrastructureError``."""
        what, digest = str(self._reference), self._reference.digest
        document = read_json(self._manifest(digest or self._reference.tag), what, digest)
        for _ in range(4):  # an index of indexes
            if not is_index(document):
                break
            chosen = choose(document, self._wanted, what)
            document = read_json(self._manifest(chosen.digest), what, chosen.digest)
        manifest = read_manifest(document, what)
        config_data = self._small(f"blobs/{manifest.config.digest}")
        config = read_config(config_data, what, manifest.config.digest)
        check_platform(config, self._wanted, what)
        self._sizes = {each.digest: each.size for each in manifest.layers}
        if sum(self._sizes.values()) > self._limits.size:
            raise too_large(what)
        return checked_image(digest_of(config_data), config, [each.digest for each in manifest.layers], what)

    def open(self, layer: str, stop: threading.Event) -> IO[bytes]:
        """A layer, downloaded if it is not yet. Raises ``RLError`` and ``OSError``."""
        place = self._blob(layer)
        with _locked(place.with_suffix(".lock"), stop):
            if not place.exists():
                self._download(layer, place, stop)
            return place.open("rb")

    def close(self, *, done: bool) -> None:
        """End the connections; when the image is ``done``, its downloads are of no use any more."""
        self._client.close()
        for layer in self._sizes if done else ():
            for place in (self._blob(layer), self._blob(layer).with_suffix(".lock")):
                place.unlink(missing_ok=True)

    def _blob(self, digest: str) -> Path:
        return self._blobs / digest.removeprefix("sha256:")

    def _download(self, digest: str, place: Path, stop: threading.Event) -> None:
        import httpx

        part = place.with_suffix(".part")
        tried, have = 0, -1
        while True:
            try:
                self._continue(digest, part, stop)
                break
            except (httpx.TransportError, _TryAgainError) as error:
                before, have = have, part.stat().st_size if part.exists() else 0
                tried = 1 if have > max(before, 0) else tried + 1
                wait = error.seconds if isinstance(error, _TryAgainError) else 0.25 * 2**tried
                if tried >= _TRIES or stop.wait(wait):
                    raise InfrastructureError(f"{self._base}: {digest[:19]}: {describe(error)}") from error
        hashed = hashlib.sha256()
        with part.open("rb") as file:
            while data := file.read(_CHUNK):
                hashed.update(data)
        if f"sha256:{hashed.hexdigest()}" != digest:
            part.unlink()
            raise BadEnvironmentError(f"{self._reference}: a layer does not have the digest {digest}")
        part.rename(place)

    def _continue(self, digest: str, part: Path, stop: threading.Event) -> None:
        size = self._sizes[digest]
        have = part.stat().st_size if part.exists() else 0
        if size and have == size:
            return
        headers = {"Range": f"bytes={have}-"} if have else {}
        with self._get(f"blobs/{digest}", headers) as answer:
            if answer.status_code == 416:
                part.unlink()
                raise _TryAgainError("the registry has no such part", 0.0)
            with part.open("ab" if answer.status_code == 206 else "wb") as file:
                for data in answer.iter_raw():
                    if stop.is_set():
                        raise InfrastructureError(f"{self._reference}: the download was cancelled")
                    if file.tell() + len(data) > (size or self._limits.size):
                        raise BadEnvironmentError(f"{self._reference}: a layer is larger than its manifest says")
                    file.write(data)
        if size and part.stat().st_size < size:
            raise _TryAgainError("the connection was cut", 0.5)

    def _manifest(self, name: str) -> bytes:
        return self._small(f"manifests/{name}", {"Accept": ", ".join(ACCEPTED)})

    def _small(self, path: str, headers: dict[str, str] | None = None) -> bytes:
        import httpx

        data = b""
        try:
            with self._get(path, headers or {}) as answer:
                for chunk in answer.iter_bytes(_CHUNK):
                    data += chunk
                    if len(data) > MOST_OF_JSON:
                        raise BadEnvironmentError(f"{self._reference}: the answer of {self._base} is too large")
        except (httpx.TransportError, _TryAgainError) as error:
            raise InfrastructureError(f"{self._base}: {describe(error)}") from error
        return data

    @contextmanager
    def _get(self, path: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
        """An answer of the registry, whose content is not read yet; with a token, if it asks for one."""
        address = f"{self._base}/v2/{self._reference.repository}/{path}"
        for first in (True, False):
            own = {"Authorization": self._token} if self._token else {}
            # A proxy may pack what has a digest.
            sent = {**headers, **own, "Accept-Encoding": "identity"}
            with self._client.stream("GET", address, headers=sent) as answer:
                if answer.status_code != 401 or not first:
                    self._check(answer)
                    yield answer
                    return
                challenge = answer.headers.get("WWW-Authenticate", "")
            self._token = self._authorise(challenge)

    def _check(self, answer: httpx.Response) -> None:
        code, what = answer.status_code, str(self._reference)
        if code in (401, 403):
            raise ConfigError(
                f"{self._base} does not give {what} to you ({code}); log in by docker login, or check the name"
            )
        if code == 404:
            raise ConfigError(f"{self._base} has no image {what}")
        if code in _AGAIN:
            asked = answer.headers.get("Retry-After", "")
            wait = min(float(asked), _LONGEST_WAIT) if asked.isdigit() else 1.0
            raise _TryAgainError(f"status {code}", wait)
        if code >= 400 and code != 416:
            raise InfrastructureError(f"{self._base}: status {code} for {what}")

    def _authorise(self, challenge: str) -> str:
        """The header that a registry asks for. Raises ``ConfigError``."""
        import httpx

        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic" and self._login:
            return f"Basic {self._login}"
        asked = dict(_PARAMETER.findall(rest))
        if scheme.lower() != "bearer" or "realm" not in asked:
            raise ConfigError(f"{self._base} wants a login for {self._reference}; log in by docker login")
        realm = _address(asked["realm"])
        scope = asked.get("scope") or f"repository:{self._reference.repository}:pull"
        query = {"scope": scope, **({"service": asked["service"]} if "service" in asked else {})}
        headers = {"Authorization": f"Basic {self._login}"} if self._login else {}
        try:
            answer = self._client.get(realm, params=query, headers=headers)
            answer.raise_for_status()
            given = answer.json()
            token = given.get("token") or given.get("access_token")
        except (httpx.HTTPError, ValueError, AttributeError) as error:
            raise InfrastructureError(f"{urlsplit(realm).netloc} gives no token: {describe(error)}") from error
        if not isinstance(token, str) or not token.isprintable():
            raise InfrastructureError(f"{urlsplit(realm).netloc} gives no token")
        return f"Bearer {token}"


class _TryAgainError(Exception):
    """Something that may work after some ``seconds``."""

    def __init__(self, why: str, seconds: float) -> None:
        super().__init__(why)
        self.seconds = seconds


def _default_address(host: str) -> str:
    if host == "docker.io":
        return "https://registry-1.docker.io"
    return f"http://{host}" if _is_loopback(host) else f"https://{host}"


def _address(text: str) -> str:
    """An address, which is encrypted unless it is this machine's. Raises ``ConfigError``."""
    parts = urlsplit(text)
    if not parts.netloc or parts.scheme not in ("http", "https") or "@" in parts.netloc:
        raise ConfigError(f"{text[:200]!r} is no address of a registry, as https://registry.example.org is")
    if parts.scheme == "http" and not _is_loopback(parts.netloc):
        raise ConfigError(f"{text}: without https only registries on this machine are asked")
    return text.rstrip("/")


def _is_loopback(host: str) -> bool:
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    return name in ("localhost", "127.0.0.1", "[::1]")


def _login(host: str) -> str:
    """``user:password`` in base64, as ``docker login`` keeps it; empty without one."""
    folder = Path(os.environ.get("DOCKER_CONFIG") or "~/.docker").expanduser()
    try:
        auths = json.loads((folder / "config.json").read_text()).get("auths", {})
        found = auths.get(_HUB_LOGIN if host == "docker.io" else host, {}).get("auth", "")
        base64.b64decode(found, validate=True)
    except (OSError, ValueError, AttributeError):
        return ""
    return found


@contextmanager
def _locked(file: Path, stop: threading.Event) -> Iterator[None]:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if stop.is_set():
                    raise InfrastructureError("waiting for another download was cancelled") from None
                time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)
