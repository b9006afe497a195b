"""Mistakes of dispatch that two kinds of tests must notice: random histories of the cores alone (tests/broker), and whole worlds
with clients (tests/simulation).

A mistake is a context in which some method of the product behaves as a plausible mistake would make it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from cepheid_broker.dispatch_failover import FailoverDispatch
from cepheid_broker.holders import Holders
from cepheid_broker.key_places import KeyPlaces
from cepheid_broker.waiting_keys import WaitingKeys


def _nothing(*_: Any, **__: Any) -> None: ...


@contextlib.contextmanager
def forget_what_a_leaver_held() -> Iterator[None]:
    """It comes again to nobody while others are connected."""
    remove = Holders.remove

    def remove_empty(self: Holders, key: int) -> Any:
        holder = remove(self, key)
        if holder is not None:
            holder.outstanding.clear()
        return holder

    with mock.patch.object(Holders, "remove", remove_empty):
        yield


@contextlib.contextmanager
def give_a_key_to_two_consumers() -> Iterator[None]:
    """A key that moved goes on at its new consumer at once, whoever holds earlier messages of it."""
    with mock.patch.object(KeyPlaces, "receiver", KeyPlaces._owner):
        yield


@contextlib.contextmanager
def let_later_messages_of_a_key_pass() -> Iterator[None]:
    """Whoever can take the next message of a key gets it, though an earlier one waits to be sent again."""
    with mock.patch.object(WaitingKeys, "__contains__", return_value=False):
        yield


@contextlib.contextmanager
def keep_a_key_at_who_has_acknowledged() -> Iterator[None]:
    """The last acknowledgement of the old consumer does not let a key go on at the new one."""
    release = KeyPlaces.release

    def release_quietly(self: KeyPlaces, key_hash: int) -> None:
        with mock.patch.object(KeyPlaces, "_place", _nothing):
            release(self, key_hash)

    with mock.patch.object(KeyPlaces, "release", release_quietly):
        yield


@contextlib.contextmanager
def take_over_without_going_back() -> Iterator[None]:
    """The next active consumer of a Failover subscription goes on where the one before stopped."""
    on_rewind = FailoverDispatch.on_rewind

    def stay(self: FailoverDispatch) -> None:
        if not self._candidates:
            on_rewind(self)

    with mock.patch.object(FailoverDispatch, "on_rewind", stay):
        yield
