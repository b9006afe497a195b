"""Mistakes of dispatch that two kinds of tests must notice: random histories of the cores alone (tests/broker), and whole worlds
with clients (tests/simulation).

A mistake is a context in which some method of the product behaves as a plausible mistake would make it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

from cepheid_broker.dispatch.dispatch_failover import FailoverDispatch
from cepheid_broker.dispatch.dispatch_key_shared import KeySharedDispatch
from cepheid_broker.dispatch.holders import Holders
from cepheid_broker.dispatch.key_places import KeyPlaces
from cepheid_broker.dispatch.waiting_keys import WaitingKeys


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
def let_later_messages_pass_what_is_sent_again() -> Iterator[None]:
    """What was given back, or left behind by its consumer, waits for its turn, and new messages of its key do not wait for it."""
    sent: WeakKeyDictionary[KeySharedDispatch, dict[tuple[int, int], None]] = WeakKeyDictionary()
    give, share_out = KeySharedDispatch._give, KeySharedDispatch._share_out

    class Unsent:
        def __init__(self, core: KeySharedDispatch) -> None:
            self._keys, self._sent = core._waiting, sent.setdefault(core, {})

        def __getattr__(self, name: str) -> Any:
            return getattr(self._keys, name)

        def __contains__(self, key_hash: int) -> bool:
            key = self._keys.get(key_hash)
            return key is not None and any(position not in self._sent for position in key.positions)

    def give_and_note(self: KeySharedDispatch, holder: Any, counted: Any, entry_id: int, *more: Any) -> None:
        sent.setdefault(self, {})[counted.ledger_id, entry_id] = None
        give(self, holder, counted, entry_id, *more)

    def share_out_past(self: KeySharedDispatch, *args: Any) -> int:
        waiting: Any = Unsent(self)
        with mock.patch.object(self, "_waiting", waiting):
            return share_out(self, *args)

    with (
        mock.patch.object(KeySharedDispatch, "_give", give_and_note),
        mock.patch.object(KeySharedDispatch, "_share_out", share_out_past),
    ):
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
