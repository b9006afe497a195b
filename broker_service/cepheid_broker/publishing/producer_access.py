"""Which producers may publish to a topic, without I/O: names, access modes and the topic's epoch (protocol.md §9.2-§9.4).

    ask ──► Admit                                      Shared, while no producer holds the topic or waits for it
       ├──► SaveEpoch ──on_epoch_saved──► Admit        the exclusive modes
       ├──► Wait ──(all left)──► SaveEpoch ──on_epoch_saved──► Admit
       └──► Refuse

The epoch counts exclusive holders. A holder gets its epoch and shows it when it reconnects; one that shows an older epoch was
replaced meanwhile and is refused for good.

Rules
1. A name belongs to one applicant at a time, connected or not yet. A producer that displaces others also takes its name from them.
2. Each new exclusive holder has a higher epoch than the one before, which is durable before the holder learns it. One that
   reconnects with the present epoch keeps it, unless it displaces another holder.
3. Waiting producers are admitted in the order of their requests, when none is connected any more.
4. A new incarnation on the same connection takes its predecessor's place: no other is promoted in between.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class AccessMode(enum.IntEnum):
    """Access mode; values as in ProducerAccessMode of the protocol."""

    SHARED = 0
    EXCLUSIVE = 1
    WAIT_FOR_EXCLUSIVE = 2
    EXCLUSIVE_WITH_FENCING = 3


class Applicant(Protocol):
    """A producer that wants to publish; compared by identity."""

    @property
    def name(self) -> str: ...

    @property
    def access_mode(self) -> AccessMode: ...

    @property
    def shown_epoch(self) -> int | None:
        """Topic epoch that its client got earlier."""


A = TypeVar("A", bound=Applicant)


class Why(enum.Enum):
    NAME_IN_USE = "its name is in use"
    HELD = "an exclusive producer is connected or waiting"
    FENCED = "it cannot be the only producer, or was replaced as such"
    TOO_MANY = "the topic has as many producers as it may have"
    NOT_SAVED = "the topic epoch could not be saved"


@dataclass(frozen=True, slots=True)
class Admit(Generic[A]):
    applicant: A
    epoch: int | None


@dataclass(frozen=True, slots=True)
class Wait(Generic[A]):
    applicant: A


@dataclass(frozen=True, slots=True)
class Refuse(Generic[A]):
    applicant: A
    why: Why
    by: A | None = None
    """The conflicting producer: if its connection is dead, asking again may succeed."""


@dataclass(frozen=True, slots=True)
class Close(Generic[A]):
    """Close an applicant that was connected and is displaced."""

    applicant: A


@dataclass(frozen=True, slots=True)
class SaveEpoch:
    """Save the epoch; answer by `on_epoch_saved` or `on_epoch_failed`. At most one is pending."""

    epoch: int


Effect = Admit[A] | Wait[A] | Refuse[A] | Close[A] | SaveEpoch


class ProducerAccess(Generic[A]):
    """Access of producers to one topic."""

    def __init__(self, epoch: int | None = None) -> None:
        self.epoch = epoch
        self._names: dict[str, A] = {}
        self._connected: dict[A, None] = {}
        self._waiting: dict[A, None] = {}
        self._holder: A | None = None  # exclusive: connected, or being saved
        self._saving_for: A | None = None
        self._saving: int | None = None
        self._displaced = False  # the present holder displaced another one: rule 2

    def __repr__(self) -> str:
        held = f", held by {self._holder.name!r}" if self._holder else ""
        return f"<ProducerAccess {len(self._connected)} connected, {len(self._waiting)} waiting{held}, epoch {self.epoch}>"

    def __len__(self) -> int:
        """Number of applicants, connected and waiting."""
        return len(self._names)

    def __contains__(self, applicant: A) -> bool:
        return self._names.get(applicant.name) is applicant

    @property
    def applicants(self) -> Sequence[A]:
        return list(self._names.values())

    def holds_name(self, name: str) -> bool:
        return name in self._names

    # Events

    def ask(self, applicant: A, replaces: A | None = None, *, most: int = 0) -> list[Effect[A]]:
        """Ask to publish. `replaces`: an earlier, closed incarnation of the same producer. `most`: limit of producers; 0: none."""
        effects: list[Effect[A]] = []
        if replaces is not None and replaces in self:
            if replaces.name == applicant.name and replaces.access_mode == applicant.access_mode:
                return self._swap(replaces, applicant)
            effects = self.leave(replaces)
        fences = applicant.access_mode is AccessMode.EXCLUSIVE_WITH_FENCING
        if not fences and (named := self._names.get(applicant.name)) is not None:
            return [*effects, Refuse(applicant, Why.NAME_IN_USE, named)]
        if applicant.access_mode is not AccessMode.SHARED and self._was_replaced(applicant):
            return [*effects, Refuse(applicant, Why.FENCED)]
        if 0 < most <= len(self) and not fences:
            return [*effects, Refuse(applicant, Why.TOO_MANY)]
        in_the_way = self._holder or next(iter(self._waiting), None) or next(iter(self._connected), None)
        match applicant.access_mode:
            case AccessMode.SHARED if self._holder is not None or self._waiting:
                effects.append(Refuse(applicant, Why.HELD, in_the_way))
            case AccessMode.SHARED:
                self._names[applicant.name] = applicant
                self._connected[applicant] = None
                effects.append(Admit(applicant, self.epoch))
            case AccessMode.EXCLUSIVE if in_the_way is not None:
                effects.append(Refuse(applicant, Why.FENCED, in_the_way))
            case AccessMode.WAIT_FOR_EXCLUSIVE if in_the_way is not None:
                self._names[applicant.name] = applicant
                self._waiting[applicant] = None
                effects.append(Wait(applicant))
            case AccessMode.EXCLUSIVE_WITH_FENCING:
                effects += self._push_aside()
                effects += self._claim(applicant)
            case _:
                effects += self._claim(applicant)
        return effects

    def leave(self, applicant: A) -> list[Effect[A]]:
        """Remove an applicant that closed, gave up waiting or lost its connection. Unknown ones are ignored."""
        if applicant not in self:
            return []
        self._forget(applicant)
        return self._promote()

    def on_epoch_saved(self) -> list[Effect[A]]:
        assert self._saving is not None
        self.epoch, self._saving = self._saving, None
        claimed_for, self._saving_for = self._saving_for, None
        if self._holder is None:
            return self._promote()
        return self._admit_holder() if self._holder is claimed_for else self._start_holding()

    def on_epoch_failed(self) -> list[Effect[A]]:
        """Refuse all that are not connected: they ask again, and get the state of that time."""
        assert self._saving is not None
        self._saving = self._saving_for = None
        refused = [*([self._holder] if self._holder is not None else []), *self._waiting]
        for applicant in refused:
            self._forget(applicant)
        return [Refuse(applicant, Why.NOT_SAVED) for applicant in refused]

    # Decisions

    def _was_replaced(self, applicant: A) -> bool:
        return applicant.shown_epoch is not None and self.epoch is not None and applicant.shown_epoch < self.epoch

    def _push_aside(self) -> list[Effect[A]]:
        effects: list[Effect[A]] = []
        self._displaced = self._holder is not None
        for applicant in list(self._names.values()):
            effects.append(Close(applicant) if applicant in self._connected else Refuse(applicant, Why.FENCED))
            self._forget(applicant)
        return effects

    def _claim(self, applicant: A) -> list[Effect[A]]:
        assert self._holder is None
        assert not self._connected
        self._names[applicant.name] = applicant
        self._holder = applicant
        # If a save for an applicant that left is pending, the next one starts when it is done.
        return [] if self._saving is not None else self._start_holding()

    def _start_holding(self) -> list[Effect[A]]:
        holder = self._holder
        assert holder is not None
        if self.epoch is not None and holder.shown_epoch == self.epoch and not self._displaced:
            return self._admit_holder()
        self._saving_for, self._saving = holder, 0 if self.epoch is None else self.epoch + 1
        return [SaveEpoch(self._saving)]

    def _admit_holder(self) -> list[Effect[A]]:
        assert self._holder is not None
        self._displaced = False
        self._connected[self._holder] = None
        return [Admit(self._holder, self.epoch)]

    def _promote(self) -> list[Effect[A]]:
        effects: list[Effect[A]] = []
        while self._waiting and not self._connected and self._holder is None and self._saving is None:
            applicant = next(iter(self._waiting))
            del self._waiting[applicant]
            if self._was_replaced(applicant):
                self._forget(applicant)
                effects.append(Refuse(applicant, Why.FENCED))
            else:
                effects += self._claim(applicant)
        return effects

    def _swap(self, old: A, new: A) -> list[Effect[A]]:
        """Put a new incarnation in its predecessor's place (rule 4)."""
        self._names[new.name] = new
        if self._holder is old:
            self._holder = new
        if self._saving_for is old:
            self._saving_for = new
        if old in self._waiting:
            self._waiting = {new if applicant is old else applicant: None for applicant in self._waiting}
            return [Wait(new)]
        if old in self._connected:
            del self._connected[old]
            self._connected[new] = None
            return [Admit(new, self.epoch)]
        return []  # admitted when the pending save is done

    def _forget(self, applicant: A) -> None:
        del self._names[applicant.name]
        self._connected.pop(applicant, None)
        self._waiting.pop(applicant, None)
        if self._holder is applicant:
            self._holder = None
