"""Mistakes that cost room, and make no answer wrong: what is taken and never given back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from cepheid_broker.managed_ledger.catch_up import CatchUpReads
from cepheid_ledger.bookie_channel import BookieChannel
from cepheid_ledger.unconfirmed import Unconfirmed

Mutant = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def charge_for_ever_for_what_newcomers_got() -> Iterator[None]:
    """A change of an ensemble lets its groups go, and their bytes stay in what all writers share."""

    def let_go(self: Unconfirmed) -> None:
        self._keeping = False
        self._kept, self._kept_size = [], 0

    with mock.patch.object(Unconfirmed, "let_go", let_go):
        yield


@contextlib.contextmanager
def charge_for_ever_for_what_nobody_fetched() -> Iterator[None]:
    """What was read ahead is dropped, and its bytes stay in the budget of all topics."""

    def drop(self: CatchUpReads, stream: Any) -> None:
        stream.dropped = True
        stream.size_bytes = 0
        stream.groups.clear()

    with mock.patch.object(CatchUpReads, "_drop", drop):
        yield


@contextlib.contextmanager
def charge_for_ever_for_what_was_not_sent() -> Iterator[None]:
    """A lane that is closed drops its queue, and the bytes stay in the window of its bookie."""
    close_lane = BookieChannel.close_lane

    def close_and_forget(self: BookieChannel, lane: Any) -> None:
        before = self._waiting_bytes
        close_lane(self, lane)
        self._waiting_bytes = before

    with mock.patch.object(BookieChannel, "close_lane", close_and_forget):
        yield


BOUNDS_MUTANTS: Sequence[Mutant] = (
    charge_for_ever_for_what_newcomers_got,
    charge_for_ever_for_what_nobody_fetched,
    charge_for_ever_for_what_was_not_sent,
)
