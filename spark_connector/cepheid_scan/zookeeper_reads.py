"""Reads ZooKeeper for planners, many keys at a time, from a thread that may block: one session, no watches, no writes.

A read on a lost connection is repeated until `retry_s` is over: kazoo connects to another server meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kazoo.client import KazooClient
from kazoo.exceptions import (
    AuthFailedError,
    ConnectionClosedError,
    ConnectionLoss,
    KazooException,
    NoAuthError,
    NoNodeError,
    OperationTimeoutError,
    SessionExpiredError,
)
from kazoo.handlers.threading import KazooTimeoutError

from cepheid_decode.errors import BadOptionError, PlanUnavailableError
from cepheid_decode.scan_request import PlanSource
from cepheid_metadata import MetadataError, Record
from cepheid_metadata.open_store import AUTH_FILE_VARIABLE, AUTH_VARIABLE, auth_from_environment, parse_zookeeper
from cepheid_security import ClientTls

_AT_ONCE = 500
_SESSION_TIMEOUT_S = 10.0
_REQUEST_TIMEOUT_S = 15.0
_PAUSE_S = 0.2
_PASSING = (ConnectionLoss, ConnectionClosedError, SessionExpiredError, OperationTimeoutError, KazooTimeoutError)

R = TypeVar("R", bound=Record)


class ZooKeeperReads:
    """A session for reads. `close` once. Raises BadOptionError (invalid URL), PlanUnavailableError."""

    def __init__(self, source: PlanSource) -> None:
        self._addresses, self._root = _parsed(source.metadata or "")
        self._retry_s = source.retry_s
        auth = _credentials()
        files = ClientTls.of_metadata() or source.tls or ClientTls.from_environment()
        secured = files if (source.metadata or "").startswith("zks:") else None
        self._client: Any = KazooClient(
            hosts=",".join(self._addresses),
            timeout=_SESSION_TIMEOUT_S,
            auth_data=[("digest", auth)] if auth else None,
            read_only=True,
            use_ssl=secured is not None,
            check_hostname=secured is not None,
            ca=secured.ca_file if secured else None,
            certfile=secured.certificate_file if secured else None,
            keyfile=secured.key_file if secured else None,
            logger=_quiet_logger(),
        )
        try:
            self._client.start(timeout=max(1.0, min(source.retry_s, _REQUEST_TIMEOUT_S)))
        except (KazooTimeoutError, AuthFailedError) as error:
            self.close()
            raise PlanUnavailableError(f"no session with {self}: {error}", metadata=source.metadata) from None

    def __repr__(self) -> str:
        return f"ZooKeeper at {','.join(self._addresses)}{self._root}"

    __str__ = __repr__

    def close(self) -> None:
        self._client.stop()
        self._client.close()

    def values(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values; None: there is no such key."""
        found = self._asked(keys, self._client.get_async)
        return [None if one is None else one[0] for one in found]

    def records(self, keys: Sequence[str], kind: type[R]) -> list[R | None]:
        try:
            return [None if value is None else kind.decode(value, key) for key, value in zip(keys, self.values(keys), strict=True)]
        except MetadataError as error:
            raise PlanUnavailableError(f"{self}: {error}", **error.facts) from None

    def children(self, keys: Sequence[str]) -> list[list[str]]:
        """Return the children, sorted; none if there is no such key."""
        return [sorted(one or ()) for one in self._asked(keys, self._client.get_children_async)]

    def _asked(self, keys: Sequence[str], ask: Callable[[str], Any]) -> list[Any]:
        answers: list[Any] = []
        deadline = time.monotonic() + self._retry_s
        while len(answers) < len(keys):
            group = keys[len(answers) : len(answers) + _AT_ONCE]
            try:
                answers += [_answer(future) for future in [ask(f"{self._root}{key}") for key in group]]
            except _PASSING as error:
                if time.monotonic() > deadline:
                    raise PlanUnavailableError(f"no answer from {self} within {self._retry_s:g} s: {error!r}") from None
                time.sleep(_PAUSE_S)
            except NoAuthError:
                raise PlanUnavailableError(
                    f"{self} denies access to {group[0]}: use a broker instead (service.url), or set {AUTH_VARIABLE} or "
                    f"{AUTH_FILE_VARIABLE} to the credentials of the cluster"
                ) from None
            except KazooException as error:
                raise PlanUnavailableError(f"{self} refuses to read {group[0]}: {error!r}") from None
        return answers


def _credentials() -> str:
    """Return `user:password`, "" if there is none. Raises BadOptionError."""
    try:
        return auth_from_environment().removeprefix("digest:")
    except MetadataError as error:
        raise BadOptionError(str(error)) from None


def _answer(future: Any) -> Any:
    try:
        return future.get(timeout=_REQUEST_TIMEOUT_S)
    except NoNodeError:
        return None


def _parsed(url: str) -> tuple[list[str], str]:
    scheme, _, rest = url.partition(":")
    if scheme == "rocksdb":
        raise BadOptionError(
            "an embedded store belongs to its process: ask that one, with service.url (pulsar://host:6650)", value=url
        )
    if scheme not in ("zk", "zks"):
        raise BadOptionError("the address of the metadata looks like zk://host:2181[,host:2181][/root]")  # it may contain a secret
    try:
        return parse_zookeeper(rest)
    except MetadataError as error:
        raise BadOptionError(str(error)) from None


def _quiet_logger() -> logging.Logger:
    """Return a logger for errors only, unaffected by configurations:

    below warnings kazoo logs the credentials with each request.
    """
    logger = logging.Logger("cepheid_scan.kazoo", logging.ERROR)
    logger.parent = logging.getLogger(__name__)
    return logger
