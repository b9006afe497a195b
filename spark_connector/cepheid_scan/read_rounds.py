"""Decides when a read that no replica answers is retried or given up. No I/O; the clock is passed in.

    fails at a, at b, at c ──► pause 50 ms ──► a, b, c ──► pause 100 ms ──► … 2 s … ──► GivenUpError
                     any entry that arrives ──► everything is reset

Rule 1: a round is over when all bookies that should have the entry have failed.
Rule 2: if all of them certainly never had it, waiting is useless: metadata must be read.
Rule 3: if one of them says that the ticket has expired, a new one is needed before anything is read.
Rule 4: a ticket whose key a bookie does not know is sent twice: the key may not have reached the bookie yet. If it is still unknown
then, a new ticket is needed, as after an expiry; if that does not help either, rule 5 applies to the bookie.
Rule 5: while one of them may come back, it continues for at least `unreachable_s`; otherwise only the number of rounds counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from cepheid_rpc import Status
from cepheid_scan.striped_source import ReplicaFailure

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
UNKNOWN_KEY_ROUNDS = 2
OVERLOAD_PATIENCE = 20
"""Factor for the patience with a bookie that says "later": it is alive, unlike one that does not answer."""


class GivenUpError(Exception):
    """A read of one entry was given up, with the answer of each bookie. The source translates it for its caller."""

    def __init__(self, entry_id: int, rounds: int, failures: Sequence[ReplicaFailure], *, needs_ticket: bool = False) -> None:
        self.entry_id = entry_id
        self.rounds = rounds
        said_until = min((failure.until for failure in failures), default=-1)
        self.until = max(entry_id, said_until)  # all of them gave the same answer for entries up to this one
        statuses = [failure.status for failure in failures]
        known = all(status is not None and (status.certain_no or status is Status.BAD_DIGEST) for status in statuses)
        self.is_damaged = known and Status.BAD_DIGEST in statuses  # and no bookie that may have it intact is merely away
        self.needs_ticket = needs_ticket
        self.is_key_unknown = Status.TICKET_KEY_UNKNOWN in statuses
        self.reasons = ", ".join(f"{failure.bookie}: {failure.reason}" for failure in failures)
        super().__init__(self.reasons)


class ReadRounds:
    """Rounds of one read. `failures`: by position in the ensemble, of this round. `may_renew`: whether a ticket with an unknown key
    can be replaced.
    """

    def __init__(self, read_attempts: int, unreachable_s: float, *, may_renew: bool = False) -> None:
        self._may_renew = may_renew
        self._read_attempts = read_attempts
        self._unreachable_s = unreachable_s
        self._rounds = 0
        self._since: float | None = None
        self.failures: dict[int, ReplicaFailure] = {}

    def on_failed(self, failure: ReplicaFailure, now: float) -> None:
        self.failures[failure.position] = failure
        self._since = now if self._since is None else self._since

    def on_progress(self) -> None:
        if self._since is not None:
            self._rounds, self._since = 0, None
            self.failures.clear()

    def end_round(self, entry_id: int, failures: Sequence[ReplicaFailure], now: float) -> float:
        """Return the seconds to wait before the next round.

        `failures`: of all bookies that should have the entry. Raises GivenUpError.
        """
        self._rounds += 1
        waited_s = 0.0 if self._since is None else now - self._since
        statuses = {failure.status for failure in failures}
        patience_s = self._unreachable_s * (OVERLOAD_PATIENCE if Status.OVERLOADED in statuses else 1)
        certain = all(failure.status is not None and failure.status.certain_no for failure in failures)
        may_pass = any(failure.may_pass for failure in failures)
        is_unknown = self._may_renew and self._rounds >= UNKNOWN_KEY_ROUNDS and Status.TICKET_KEY_UNKNOWN in statuses
        expired = is_unknown or Status.TICKET_EXPIRED in statuses
        if certain or expired or (self._rounds >= self._read_attempts and not (may_pass and waited_s < patience_s)):
            raise GivenUpError(entry_id, self._rounds, failures, needs_ticket=expired)
        self.failures.clear()
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self._rounds - 1, 16), LONGEST_PAUSE_S)
        return max(pause_s, *(failure.retry_after_s for failure in failures))
