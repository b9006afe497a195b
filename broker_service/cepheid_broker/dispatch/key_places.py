"""Where each key hash of a Key_Shared subscription belongs now: its owner, the consumer that still holds entries, waiting entries.

    owner (key_owners.py), or where a chunked message pins it ─┐
    held: another consumer has unacknowledged entries of it ────┴─► receiver: the consumer that may get the next entry, or none
                                                                        └──► the door where its entries wait (waiting_keys.py)

Every change of these places waiting entries again; rules 3 and 5 of dispatch_key_shared.py are kept here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from cepheid_broker.dispatch.chunk_owners import Chunked, ChunkOwners
from cepheid_broker.dispatch.counted_group import Chunk
from cepheid_broker.dispatch.effects import AckView, HashRange, Idle, Why
from cepheid_broker.dispatch.holders import MAX_REASONS, Holder, Holders, first_held_of, hashes_held
from cepheid_broker.dispatch.key_owners import KeyOwners
from cepheid_broker.dispatch.waiting_keys import WaitingKey, WaitingKeys
from cepheid_metadata import Position


class KeyPlaces:
    def __init__(self, owners: KeyOwners, holders: Holders, *, in_order: bool, max_chunked_messages: int) -> None:
        self.owners = owners
        self.waiting = WaitingKeys()
        self._holders = holders
        self._in_order = in_order
        self._held: dict[int, tuple[Holder, int]] = {}  # hash → the consumer that holds entries of it, and how many
        self._chunks = ChunkOwners(max_chunked_messages)
        self._pins: dict[int, tuple[Holder, int]] = {}  # hash → pinned consumer, and number of chunked messages that pin it

    def __repr__(self) -> str:
        return f"<KeyPlaces {self.owners!r}, {len(self._held)} hashes held, {self.waiting!r}>"

    # Consumers

    def join(self, consumer: int, ranges: Sequence[HashRange] | None) -> None:
        self.owners.join(consumer, ranges)
        self._place_all()

    def leave(self, holder: Holder) -> None:
        """Place the entries of a consumer that was removed from `Holders`: they wait for others."""
        self.owners.leave(holder.key)
        self._held = {key_hash: held for key_hash, held in self._held.items() if held[0] is not holder}
        self._pins = {key_hash: pin for key_hash, pin in self._pins.items() if pin[0] is not holder}
        self._chunks.leave(holder)
        for ledger_id, entries in holder.outstanding.items():
            for entry_id, key_hash in hashes_held(entries):
                self.wait(key_hash, ledger_id, entry_id)
        self._place_all()

    def clear(self) -> None:
        """Forget all state, when nothing is outstanding or waiting."""
        self.waiting.clear()
        self._held.clear()
        self._chunks.clear()
        self._pins.clear()

    # Entries

    def _owner(self, key_hash: int) -> Holder | None:
        if self._pins and (pin := self._pins.get(key_hash)) is not None:
            return pin[0]
        owner = self.owners.owner(key_hash)
        return None if owner is None else self._holders.by_key[owner]

    def receiver(self, key_hash: int) -> Holder | None:
        """Return the consumer that may get the next entry of this hash; None if there is none now (rules 1 and 3)."""
        owner = self._owner(key_hash)
        held = self._held.get(key_hash)
        return owner if held is None or held[0] is owner else None

    def hold(self, key_hash: int, holder: Holder) -> None:
        if self._in_order:
            held = self._held.get(key_hash)
            self._held[key_hash] = (holder, 1 if held is None else held[1] + 1)

    def release(self, key_hash: int) -> None:
        """Note that one entry of the hash is no longer outstanding."""
        held = self._held.get(key_hash)
        if held is None:
            return  # not counted without ordering
        if held[1] > 1:
            self._held[key_hash] = (held[0], held[1] - 1)
            return
        del self._held[key_hash]
        if (key := self.waiting.get(key_hash)) is not None:
            self._place(key)

    def wait(self, key_hash: int, ledger_id: int, entry_id: int) -> WaitingKey:
        is_new = key_hash not in self.waiting
        key = self.waiting.add(key_hash, ledger_id, entry_id)
        if is_new:
            key.since_ms = self._holders.now_ms
            self._place(key)
        return key

    def _place(self, key: WaitingKey) -> None:
        receiver = self.receiver(key.key_hash)
        door = None if receiver is None else receiver.key
        if door != key.door:
            self.waiting.move(key, door)
            key.since_ms = self._holders.now_ms

    def _place_all(self) -> None:
        for key in self.waiting:
            self._place(key)

    def note_chunk(self, chunk: Chunk, key_hash: int, holder: Holder, position: Position) -> None:
        """Note that a chunk was sent (rule 5)."""
        if chunk.is_last:
            self._unpin(self._chunks.forget(chunk.uuid))
            return
        if self._chunks.owner(chunk.uuid) is None:
            pin = self._pins.get(key_hash)
            self._pins[key_hash] = holder, 1 if pin is None else pin[1] + 1
        self._unpin(self._chunks.give(chunk.uuid, holder, position, key_hash))

    def on_acked(self, position: Position) -> None:
        if self._chunks:
            self._unpin(self._chunks.on_acked(position))

    def on_cursor_moved(self, acks: AckView) -> None:
        for done in self._chunks.forget_acknowledged(acks):
            self._unpin(done)

    def _unpin(self, chunked: Chunked | None) -> None:
        if chunked is None:
            return
        key_hash = chunked.key_hash
        _, messages = self._pins[key_hash]
        if messages > 1:
            self._pins[key_hash] = chunked.owner, messages - 1
            return
        del self._pins[key_hash]
        if (key := self.waiting.get(key_hash)) is not None:
            self._place(key)

    # Reasons

    def why(self) -> list[Why]:
        """Return why keys have no receiver now."""
        keys = list(islice((key for key in self.waiting if key.door is None), MAX_REASONS))
        drained: dict[int, tuple[Holder, dict[int, None]]] = {}  # each consumer that holds some of them is searched once
        for key in keys:
            if (held := self._held.get(key.key_hash)) is not None:
                drained.setdefault(held[0].key, (held[0], {}))[1][key.key_hash] = None
        oldest = {k: p for holder, hashes in drained.values() for k, p in first_held_of(holder, hashes).items()}
        return [self._why(key, oldest.get(key.key_hash)) for key in keys]

    def _why(self, key: WaitingKey, oldest: Position | None) -> Why:
        name = f"{key.example!r} (hash {key.key_hash})" if key.example is not None else f"hash {key.key_hash}"
        details = f"{len(key.positions)} entries of it wait, the first is {key.first}"
        since_s = self._holders.since_s(key.since_ms)
        held = self._held.get(key.key_hash)
        if held is None:
            return Why(Idle.RANGE_HOLE, None, name, key.first, since_s=since_s, details=details)
        holder, count = held
        details += f"; that consumer holds {count}, the oldest is this entry"
        return Why(Idle.KEY_DRAINING, holder.name, name, oldest, since_s=since_s, details=details)
