"""Opens the metadata store of a cluster: a process that starts before its store waits for it, logs that, and has a time limit."""

from __future__ import annotations

import asyncio
import logging

from cepheid_metadata.errors import StoreInUseError, StoreOpenError, StoreUnavailableError
from cepheid_metadata.open_store import open_store, read_auth
from cepheid_metadata.store import MetadataStore, security_of
from cepheid_ports import Ports
from cepheid_security import ClientTls

log = logging.getLogger(__name__)

_ATTEMPT_S = 5.0
_PAUSE_S = 0.5


async def open_patiently(
    url: str,
    ports: Ports,
    *,
    session_timeout_s: float,
    wait_s: float,
    auth: str | None = None,
    auth_file: str | None = None,
    private: bool = True,
    tls: ClientTls | None = None,
) -> MetadataStore:
    """Return the store at `url`. `auth`, the text in `auth_file`, `private` and `tls`: as in `open_store`.

    A process that has a user or a certificate, but no TLS to ZooKeeper, logs that.

    Raises StoreOpenError if it cannot be reached for `wait_s`, StoreUrlError.
    """
    if auth is None and auth_file is not None:
        auth = read_auth(auth_file)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    while True:
        attempt_s = max(0.1, min(_ATTEMPT_S, deadline - loop.time()))
        try:
            store = await open_store(
                url, ports, session_timeout_s=session_timeout_s, open_timeout_s=attempt_s, auth=auth, private=private, tls=tls
            )
        except StoreInUseError:
            raise
        except (StoreOpenError, StoreUnavailableError) as error:
            left_s = deadline - loop.time()
            if left_s <= 0:
                raise
            log.warning("metadata.waited_for", extra={"error": str(error), "left_s": round(left_s, 1)})
            await asyncio.sleep(min(_PAUSE_S, left_s))
        else:
            if (auth or tls is not None) and (problem := security_of(store).plain_problem) is not None:
                log.warning("metadata.not_encrypted", extra={"error": problem, "hint": "see ZooKeeper in docs/security.md"})
            return store
