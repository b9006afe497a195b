"""Which bookies brokers believe to be writable: what registrations and their watches come to, a session's length late.

serving and writable ──► listed ──crash──► listed still, for as long as the session lives ──► gone
                           └──disk full──► not listed: registered as read-only
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

SESSION_S = 1.0


class Registered(Protocol):
    @property
    def serving(self) -> bool: ...

    @property
    def writable(self) -> bool: ...

    @property
    def down_since_s(self) -> float: ...


class SimDirectory:
    def __init__(self, bookies: Mapping[str, Registered]) -> None:
        self._bookies = bookies
        self.readonly: dict[str, None] = {}  # for scenarios: registered as such, whatever their disks are

    def __repr__(self) -> str:
        return f"<SimDirectory {self.writable()}>"

    def writable(self) -> list[str]:
        return [name for name, bookie in self._bookies.items() if self._is_listed(bookie) and name not in self.readonly]

    def _is_listed(self, bookie: Registered) -> bool:
        if bookie.serving:
            return bookie.writable
        return asyncio.get_running_loop().time() < bookie.down_since_s + SESSION_S
