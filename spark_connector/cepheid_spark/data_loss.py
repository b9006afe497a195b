"""Detects data loss of a stream: entries that were trimmed before they were read, or whose topic was deleted.

A position in another incarnation of the topic means loss, whatever the ids of its ledgers, since offsets name the incarnation.

Chains are trimmed from their heads; only ledgers that were empty when their owner died vanish in the middle. So a position whose
ledger is no longer in the chain means loss, too, except if
1. a ledger before it still exists, and nothing of its own was read (entry -1): it was empty;
2. it was seen closed up to the position, and ledgers deleted with it had no entries. Consecutive looks prove that if the last
   ledger of each chain, or one before it, is also in the next one; otherwise it may have got unseen entries, or others came and
   went;
3. nothing of it was read, the query's lease held the topic all the time, as far as known, and there is no record of a deleted
ledger
   with entries: held entries are not trimmed, but a lease may be moved (time to live, quotas, an acknowledgement).
A start from the options may be after the final end of its ledger, when its owner dies: nothing of that ledger is then to be read.
Without 1 and 2 it is in doubt if there is no sign of unread entries. Then records of ledgers decide, which
brokers keep for a while for deleted ledgers with entries (`settled`): an empty ledger that died with its broker has none.
The incarnation of an offset of format 1 is unknown: for a topic that was created again while we looked, 1 and 3 then do not apply,
and one that was created again earlier is detected by the chain, unless 1 or 3 applies, or the ids are the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cepheid_decode import DataLossError, LedgerHistory, TopicHistory
from cepheid_spark.offsets import EntryPosition
from cepheid_spark.topic_view import TopicView

_REMEMBERED_LEDGERS = 10_000
_MADE_ANEW = "it was deleted and created again"
_ADVICE = "A lease, a subscription (options subscription and leaseTtl), keeps what a query has still to read"


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss. `entries` None: an unknown number. `first_kept` None: nothing is left.

    `doubt`: ledgers whose records may show that nothing was lost, or how much. `is_held`: nothing was lost if none of them has
    entries (rule 3). `is_start`: nothing of the ledger at the position was read.
    """

    topic: str
    after: EntryPosition
    first_kept: int | None  # a ledger
    what: str
    entries: int | None = None
    doubt: range | None = None
    is_held: bool = False
    is_start: bool = False

    def __str__(self) -> str:
        count = f"at least {self.entries} entries" if self.entries else "an unknown number of entries"
        until = "" if self.first_kept is None else f" and before ledger {self.first_kept}"
        return f"{self.topic}: {self.what}: {count} after {self.after.ledger_id}:{self.after.entry_id}{until} can no longer be read"

    def error(self) -> DataLossError:
        advice = "" if self.first_kept is None else f". {_ADVICE}"
        return DataLossError(f"{self}{advice}", topic=self.topic, after=f"{self.after.ledger_id}:{self.after.entry_id}")


class SeenLedgers:
    """Contents of ledgers as this process last saw them, and gaps between its looks at a topic."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, int], LedgerHistory] = OrderedDict()
        self._unsure: set[tuple[str, int]] = set()  # these and later ledgers may have held more than was seen
        self._settled: dict[str, tuple[EntryPosition, str, int]] = {}  # with the incarnation: nothing was lost before that ledger
        self._made_anew: set[str] = set()
        self._missing: dict[str, TopicHistory] = {}  # as they were last seen

    def on_missing(self, before: TopicHistory) -> None:
        """Note that a look did not find the topic: the next one that does is compared with the one before."""
        self._missing[before.topic] = before

    def on_view(self, before: TopicHistory | None, now: TopicHistory) -> None:
        """Remember the ledgers that were deleted between two looks."""
        before = self._missing.pop(now.topic, None) or before
        if before is None:
            return
        is_same = before.incarnation == now.incarnation
        if not is_same:
            self._made_anew.add(now.topic)
        kept = {ledger.ledger_id for ledger in now.ledgers}
        if before.ledgers and (last := before.ledgers[-1].ledger_id) not in kept:
            was_empty = is_same and any(ledger_id < last for ledger_id in kept)  # rule 1
            if not was_empty:
                self._unsure.add((now.topic, last))
        for ledger in before.ledgers:
            if ledger.ledger_id not in kept:
                self._seen[before.topic, ledger.ledger_id] = ledger
                if len(self._seen) > _REMEMBERED_LEDGERS:
                    self._unsure.discard(self._seen.popitem(last=False)[0])

    def get(self, topic: str, ledger_id: int) -> LedgerHistory | None:
        return self._seen.get((topic, ledger_id))

    def first_unsure(self, topic: str, ledger_id: int) -> int | None:
        """Return the first such ledger from this one on. None: everything written to them was seen, unless they are open."""
        found = tuple(self._unsure)  # copied at once: another thread adds to it
        return min((unsure for name, unsure in found if name == topic and unsure >= ledger_id), default=None)

    def on_settled(self, view: TopicView, position: EntryPosition) -> None:
        """Note that nothing after `position` is lost with the ledgers before the view's."""
        self._settled[view.topic] = position, view.history.incarnation, view.ledger_ids[0]

    def settled(self, view: TopicView, position: EntryPosition) -> EntryPosition:
        """Return an equivalent position, at a ledger that exists, or existed later."""
        known, incarnation, first = self._settled.get(view.topic, (None, None, 0))
        return EntryPosition(first, -1) if (known, incarnation) == (position, view.history.incarnation) else position

    def was_made_anew(self, topic: str) -> bool:
        return topic in self._made_anew

    def entries_after(self, topic: str, position: EntryPosition) -> int | None:
        """Return the number of entries in deleted ledgers, as far as known."""
        seen = tuple(self._seen.items())  # copied at once: another thread adds to it
        later = sum(each.last_entry_id + 1 for (name, ledger_id), each in seen if name == topic and ledger_id > position.ledger_id)
        first = self.get(topic, position.ledger_id)
        if first is None:
            return later or None
        return max(0, first.last_entry_id - position.entry_id) + later


def is_another(view: TopicView, incarnation: str | None) -> bool:
    """Return whether the topic was certainly deleted and created again since. False if one of the two is unknown."""
    now = view.history.incarnation
    return bool(incarnation and now) and incarnation != now


def find_loss(
    view: TopicView,
    position: EntryPosition,
    seen: SeenLedgers,
    *,
    is_held: bool,
    incarnation: str | None = None,
    is_start: bool = False,
) -> Loss | None:
    """Return the loss, if any. `is_held`: a lease has held the topic since before `position`. `incarnation`: that of `position`, if
    known.

    `is_start`: the query begins there, and nothing was read.
    """
    if is_another(view, incarnation):
        first = view.ledger_ids[0] if view.ledger_ids else None
        return Loss(view.topic, position, first, _MADE_ANEW, seen.entries_after(view.topic, position))
    position = seen.settled(view, position)
    ledger = view.ledger(position.ledger_id)
    if ledger is not None:
        if ledger.is_open or position.entry_id <= ledger.last_entry_id or is_start:
            return None
        what = f"ledger {ledger.ledger_id} ends at entry {ledger.last_entry_id}, another history than the one that was read"
        next_kept = next((ledger_id for ledger_id in view.ledger_ids if ledger_id > ledger.ledger_id), None)
        return Loss(view.topic, position, next_kept, what)
    kept = view.ledger_ids
    if not kept or kept[-1] < position.ledger_id:
        what = f"its ledgers are {kept[0]} to {kept[-1]}, it was created again" if kept else "it no longer has ledgers"
        return Loss(view.topic, position, kept[0] if kept else None, what)
    is_same = incarnation is not None or not seen.was_made_anew(view.topic)
    if is_same and (position.entry_id < 0 or is_start) and kept[0] < position.ledger_id:
        return None  # 1
    last_seen = seen.get(view.topic, position.ledger_id)
    lost_entries = seen.entries_after(view.topic, position)
    first_unsure = seen.first_unsure(view.topic, position.ledger_id) if last_seen is not None else position.ledger_id
    if not lost_entries and first_unsure is None:
        return None  # 2
    first_kept = kept[0]  # also for a topic that was created again with lower ids: its head is no older than the position
    what = f"ledger {position.ledger_id} was trimmed"
    if incarnation is None:
        what += ", or the topic was deleted and created again"
    if is_held and position.entry_id < 0 and is_same and not lost_entries:  # 3
        return Loss(view.topic, position, first_kept, what, doubt=range(position.ledger_id, first_kept), is_held=True)
    doubt = None
    is_of_this_one = is_same and (incarnation is not None or last_seen is not None)
    if first_unsure is not None and first_unsure < first_kept and is_of_this_one and not lost_entries:
        doubt = range(first_unsure, first_kept)
    return Loss(view.topic, position, first_kept, what, lost_entries, doubt, is_start=is_start)


def settled(loss: Loss, view: TopicView, seen: SeenLedgers, gone: Mapping[int, int] | None) -> Loss | None:
    """Decide a loss in doubt by records of these ledgers: last entries of those with entries. `gone` None: unknown.

    A missing record may mean that the ledger was empty, or that its record is no longer kept. If nothing of it was read, it
    was empty if it was empty when last seen, or if the topic has no entries at all; a ledger that was read had entries.
    """
    assert loss.doubt is not None, f"no doubt: {loss}"
    at, gone = loss.after, gone or {}
    lost = sum(max(0, last - (at.entry_id if ledger_id == at.ledger_id else -1)) for ledger_id, last in gone.items())
    if lost > 0:
        return replace(loss, entries=lost, doubt=None)
    if loss.is_held:
        return None
    ended = gone.get(at.ledger_id)
    if at.ledger_id not in loss.doubt or ended == at.entry_id or (loss.is_start and ended is not None):
        return None
    is_empty = seen.get(view.topic, at.ledger_id) is not None or not view.total_entries
    return None if at.entry_id < 0 and is_empty else replace(loss, doubt=None)
