"""Sets the cluster's ACL on existing nodes in ZooKeeper, or removes it: for a cluster that gets its credentials late.

    root ──► children, level by level ──► set ACL of each: only the user of `auth`, or everyone

The node `/`, if a URL has no root, stays readable for others.

What the cluster creates later has the right ACL from the start (kazoo_connection.py). A node that vanishes meanwhile is skipped.
One that is created meanwhile by a process without credentials needs a second run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NoAuthError, NoNodeError
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from cepheid_metadata.errors import AccessDeniedError, StoreOpenError, StoreUnavailableError
from cepheid_metadata.open_store import StoreUrlError, auth_from_environment, parse_zookeeper
from cepheid_metadata.zookeeper_tree import TOP_ACL
from cepheid_security import ClientTls

_AT_ONCE = 500
_TIMEOUT_S = 15.0
_OWN_NODES_OF_ZOOKEEPER = "/zookeeper"


@dataclass(frozen=True, slots=True)
class AclReport:
    """`nodes`: how many nodes have the ACL now."""

    nodes: int


def set_cluster_acls(url: str, *, auth: str | None = None, tls: ClientTls | None = None, everybody: bool = False) -> AclReport:
    """Give all nodes below the URL's root to the user of `auth` only; `everybody`: to all users. Blocking.

    Raises StoreUrlError, StoreOpenError, AccessDeniedError (the nodes belong to another user), StoreUnavailableError.
    """
    scheme, _, rest = url.partition(":")
    if scheme not in ("zk", "zks"):
        raise StoreUrlError("only ZooKeeper has ACLs: give zk://host:port or zks://host:port")
    addresses, root = parse_zookeeper(rest)
    credentials = (auth or auth_from_environment()).removeprefix("digest:")
    if ":" not in credentials:
        raise StoreUrlError("nodes are given to a user: name its credentials, as digest:user:password")
    secured = (ClientTls.of_metadata() or tls or ClientTls.from_environment()) if scheme == "zks" else None
    client: Any = KazooClient(
        hosts=",".join(addresses),
        timeout=_TIMEOUT_S,
        auth_data=[("digest", credentials)],
        logger=_quiet_logger(),
        use_ssl=secured is not None,
        check_hostname=secured is not None,
        ca=secured.ca_file if secured else None,
        certfile=secured.certificate_file if secured else None,
        keyfile=secured.key_file if secured else None,
    )
    try:
        client.start(timeout=_TIMEOUT_S)
        acl = OPEN_ACL_UNSAFE if everybody else CREATOR_ALL_ACL
        top = 0 if root else _set(client, ["/"], OPEN_ACL_UNSAFE if everybody else TOP_ACL)
        return AclReport(top + sum(_set(client, paths, acl) for paths in _walk(client, root)))
    except KazooTimeoutError:
        raise StoreOpenError(f"no session on ZooKeeper at {','.join(addresses)} within {_TIMEOUT_S:g} s") from None
    except NoAuthError as error:
        raise AccessDeniedError(f"nodes below {root or '/'} belong to another ZooKeeper user ({error!r})") from None
    except KazooException as error:
        raise StoreUnavailableError(f"ZooKeeper failed with {error!r}; run it again", outcome_unknown=True) from None
    finally:
        client.stop()
        client.close()


def _walk(client: Any, root: str) -> Iterator[Sequence[str]]:
    """Yield paths in groups, parents before children."""
    level = [root or "/"]
    if root:
        yield level
    while level:
        below: list[str] = []
        for first in range(0, len(level), _AT_ONCE):
            group = level[first : first + _AT_ONCE]
            for path, asked in [(path, client.get_children_async(path)) for path in group]:
                try:
                    names = asked.get(timeout=_TIMEOUT_S)
                except NoNodeError:
                    continue
                found = [f"{path.rstrip('/')}/{name}" for name in names]
                below += [each for each in found if each != _OWN_NODES_OF_ZOOKEEPER]
        for first in range(0, len(below), _AT_ONCE):
            yield below[first : first + _AT_ONCE]
        level = below


def _set(client: Any, paths: Sequence[str], acl: Any) -> int:
    done = 0
    for asked in [client.set_acls_async(path, acl) for path in paths]:
        try:
            asked.get(timeout=_TIMEOUT_S)
            done += 1
        except NoNodeError:
            pass  # it belonged to a process that ended
    return done


def _quiet_logger() -> logging.Logger:
    """Return a logger for errors only: below warnings kazoo logs the credentials with each request."""
    logger = logging.Logger("cepheid_metadata.kazoo", logging.ERROR)
    logger.parent = logging.getLogger(__name__)
    return logger
