"""H1 to H4: what was answered is stored, what was refused is not, once where that was promised, and in order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from tests.history.verdict import Facts, Promises, Violation, actor_and_key_of, actor_of, grouped


def check_publishing(facts: Facts, promises: Promises) -> Iterator[Violation]:
    yield from _durability(facts)
    yield from _identity(facts, promises)
    yield from _order(facts, promises)
    if promises.deduplication:
        yield from _deduplication(facts)


def _durability(facts: Facts) -> Iterator[Violation]:
    for sent in facts.sent_ok:
        places = facts.copies.get(sent.uid, [])
        if not places:
            yield Violation("H1", f"{sent.uid} was answered with {sent.position} and is not stored", (sent,))
        elif sent.position is not None and sent.position[0] >= 0 and sent.position not in places:
            yield Violation("H1", f"{sent.uid} was answered with {sent.position} and is stored at {places}", (sent,))

    answered = {sent.uid for sent in facts.sent_ok}
    for refused in facts.refused:
        others = len(facts.restarts) + facts.resends[refused.uid]  # attempts of which nobody heard what became of them
        places = facts.copies.get(refused.uid, [])
        if refused.uid not in answered and len(places) > others:
            yield Violation("H1", f"{refused.uid} was refused with {refused.error} and is stored at {places}", (refused,))


def _identity(facts: Facts, promises: Promises) -> Iterator[Violation]:
    for before, after in pairwise(facts.audit):
        assert before.position is not None
        assert after.position is not None
        if not before.position < after.position:
            yield Violation("H2", "positions do not rise", (before, after))
    answered: dict[object, str] = {}
    for sent in facts.sent_ok:
        if sent.position is not None and sent.position[0] >= 0 and answered.setdefault(sent.position, sent.uid) != sent.uid:
            yield Violation("H2", f"{sent.position} was answered for {answered[sent.position]} and for {sent.uid}", (sent,))
    for uid, places in facts.copies.items():
        most = 1 if promises.deduplication else 1 + len(facts.restarts) + facts.resends[uid]
        if uid not in facts.sends:
            yield Violation("H2", f"{uid} at {places} was never sent")
        elif len(places) > most:
            explained = f"{len(facts.restarts)} restarts and {facts.resends[uid]} resends explain {most}"
            yield Violation("H2", f"{uid} is stored {len(places)} times; {explained}: {places}")


def _order(facts: Facts, promises: Promises) -> Iterator[Violation]:
    """Resends may repeat the end of what was sent; they never swap: first copies stand in the order of sending."""
    first_rank = {uid: min(facts.rank[place] for place in places) for uid, places in facts.copies.items()}
    for sends in grouped(facts.sends.values(), actor_and_key_of if promises.key_batches else actor_of).values():
        stored = [send for send in sends if send.uid in first_rank]
        for before, after in pairwise(stored):
            if first_rank[before.uid] > first_rank[after.uid]:
                yield Violation("H4", f"{before.uid} was sent before {after.uid} and is stored behind it", (before, after))


def _deduplication(facts: Facts) -> Iterator[Violation]:
    for producer, sends in grouped(facts.sends.values(), actor_of).items():
        sequence_of = {send.uid: send.sequence_id for send in sends}
        stored = [sequence_of[event.uid] for event in facts.audit if event.uid in sequence_of]
        for before, after in pairwise(stored):
            if before >= after:
                yield Violation("H3", f"sequence ids of {producer} are stored as {before}, {after}")
        answered = [sequence_of[sent.uid] for sent in facts.sent_ok if sent.uid in sequence_of]
        if answered and max(answered) not in stored:
            yield Violation("H3", f"{producer} was answered up to {max(answered)}; stored is up to {max(stored, default=None)}")
