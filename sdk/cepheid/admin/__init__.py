"""The admin API, typed: `cepheid.admin.connect(url)` on asyncio, `cepheid.admin.sync.connect(url)` blocking.

async with cepheid.admin.connect("http://localhost:8080") as admin:
    await admin.topics.create("orders")
    await admin.namespaces.set_retention("public/default", {"retentionTimeInMinutes": 60, "retentionSizeInMB": -1})

The calls are generated from the broker's description of its API (`python -m tests.admin.admin_client_code`). Their arguments have
our names; JSON bodies and answers keep the names of the API, so that a value that was read can be changed and set.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cepheid.admin.client import Admin, connect
    from cepheid.admin.exchange import DEFAULT_URL, StoredMessage

__all__ = ["DEFAULT_URL", "Admin", "StoredMessage", "connect"]
_HOMES = {"Admin": "client", "connect": "client", "DEFAULT_URL": "exchange", "StoredMessage": "exchange"}


def __getattr__(name: str) -> Any:
    """Import a name on first use: a command line that uses `cepheid.admin.sync` does not wait for asyncio."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"cepheid.admin.{_HOMES[name]}"), name)
