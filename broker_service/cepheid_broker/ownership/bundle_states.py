"""The states of the bundles that one broker owns or is acquiring, without I/O.

           begin_acquire         on_acquired                begin_release             on_released
    (none) ─────────────► ACQUIRING ─────────► OWNED ─────────────────► RELEASING ─────────────► (none)
              on_not_acquired ◄──┘               ▲   on_kept ◄──────────────┘
              the record turns out to be ours ───┘
    on_session_lost, on_record with another owner or none: from any state, the bundle is lost at once

    OWNED ── begin_split ──► SPLITTING ── on_split ──► its parts, OWNED          on_kept: OWNED again

Rules
1. All states belong to one session of the metadata store: outcomes of an earlier session no longer matter (O3).
2. A bundle is served in OWNED and in SPLITTING, where its topics stay open. Ask right before serving it, without an await between.
3. The record decides: if it is not ours the bundle is lost, and if it is ours the bundle is owned, whatever the state was.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cepheid_broker.ownership.bundles import Bundle
from cepheid_metadata import BundleOwner


class Phase(enum.Enum):
    ACQUIRING = "acquiring"
    OWNED = "owned"
    RELEASING = "releasing"
    SPLITTING = "splitting"


@dataclass(slots=True, eq=False)
class Tenure:
    """One attempt to own a bundle, from its acquisition to its end. Compared by identity, so that an ended one matches nothing."""

    bundle: Bundle
    phase: Phase
    epoch: int = 0
    history_version: int = 0
    """Version of the history record that this tenure's acquisition wrote. While it is unchanged, no other broker has acquired."""


class BundleStates:
    """The tenures of one broker, by bundle, and counts of them."""

    def __init__(self, incarnation: str) -> None:
        self.sessions = 1
        self.acquired = 0
        self.lost = 0
        """Tenures that ended without a release."""
        self._incarnation = incarnation
        self._tenures: dict[Bundle, Tenure] = {}

    def __repr__(self) -> str:
        phases = [tenure.phase for tenure in self._tenures.values()]
        return f"<BundleStates {', '.join(f'{phases.count(phase)} {phase.value}' for phase in Phase)}>"

    @property
    def incarnation(self) -> str:
        """Id of this broker's process in the current session (rule 1)."""
        return f"{self._incarnation}-{self.sessions}"

    @property
    def held(self) -> int:
        """Number of tenures whose record is ours."""
        return sum(tenure.phase is not Phase.ACQUIRING for tenure in self._tenures.values())

    def owned(self) -> Iterator[Tenure]:
        """Yield the tenures whose record is ours, including those being released."""
        return iter([tenure for tenure in self._tenures.values() if tenure.phase is not Phase.ACQUIRING])

    def find(self, bundle: Bundle) -> Tenure | None:
        return self._tenures.get(bundle)

    def owns(self, bundle: Bundle) -> bool:
        """Return whether the bundle is served here (rule 2)."""
        tenure = self._tenures.get(bundle)
        return tenure is not None and tenure.phase in (Phase.OWNED, Phase.SPLITTING)

    def keeps(self, bundle: Bundle) -> bool:
        """Return whether the bundle's record is ours, so that no other broker can own it."""
        tenure = self._tenures.get(bundle)
        return tenure is not None and tenure.phase is not Phase.ACQUIRING

    def holds(self, tenure: Tenure) -> bool:
        """Return whether the tenure has not ended."""
        return self._tenures.get(tenure.bundle) is tenure

    def is_own(self, record: BundleOwner | None) -> bool:
        return record is not None and record.incarnation == self.incarnation

    def begin_acquire(self, bundle: Bundle) -> Tenure:
        assert bundle not in self._tenures, f"{bundle} is {self._tenures[bundle].phase.value} already"
        tenure = self._tenures[bundle] = Tenure(bundle, Phase.ACQUIRING)
        return tenure

    def on_acquired(self, tenure: Tenure, epoch: int, history_version: int) -> bool:
        """Note that the record was created. Return False if the session ended meanwhile, and the record with it."""
        if not self.holds(tenure):
            return False
        assert tenure.phase is Phase.ACQUIRING, f"{tenure.bundle} is {tenure.phase.value}"
        tenure.phase, tenure.epoch, tenure.history_version = Phase.OWNED, epoch, history_version
        self.acquired += 1
        return True

    def on_not_acquired(self, tenure: Tenure) -> None:
        """Note that the bundle was not acquired, or that the outcome is unknown (`bundle_tenures.py`, rule 3)."""
        if self.holds(tenure):
            assert tenure.phase is Phase.ACQUIRING, f"{tenure.bundle} is {tenure.phase.value}"
            del self._tenures[tenure.bundle]

    def begin_release(self, bundle: Bundle) -> Tenure | None:
        """Stop serving the bundle to new clients, and return its tenure, or None if it is not owned."""
        if not self.owns(bundle):
            return None
        tenure = self._tenures[bundle]
        assert tenure.phase is Phase.OWNED, f"{bundle} is {tenure.phase.value}"
        tenure.phase = Phase.RELEASING
        return tenure

    def begin_split(self, bundle: Bundle) -> Tenure | None:
        """Begin to split the bundle, which is still served. Return None if it is not owned, or is already released or split."""
        tenure = self._tenures.get(bundle)
        if tenure is None or tenure.phase is not Phase.OWNED:
            return None
        tenure.phase = Phase.SPLITTING
        return tenure

    def on_split(self, tenure: Tenure, parts: Sequence[Tenure]) -> bool:
        """Note that the parts' records replaced that of `tenure`. Return False if the session ended meanwhile, and all records."""
        if not self.holds(tenure):
            return False
        assert tenure.phase is Phase.SPLITTING, f"{tenure.bundle} is {tenure.phase.value}"
        del self._tenures[tenure.bundle]
        for part in parts:
            assert part.bundle not in self._tenures, f"{part.bundle} is {self._tenures[part.bundle].phase.value} already"
            part.phase = Phase.OWNED
            self._tenures[part.bundle] = part
        return True

    def on_released(self, tenure: Tenure) -> None:
        if self.holds(tenure):
            assert tenure.phase is Phase.RELEASING, f"{tenure.bundle} is {tenure.phase.value}"
            del self._tenures[tenure.bundle]

    def on_kept(self, tenure: Tenure) -> None:
        """Serve the bundle again, because its record was not deleted as far as we know. If it was, `on_record` is called."""
        if self.holds(tenure) and tenure.phase in (Phase.RELEASING, Phase.SPLITTING):
            tenure.phase = Phase.OWNED

    def on_record(self, tenure: Tenure, record: BundleOwner | None) -> bool:
        """Note an owned bundle's current record. Return whether the bundle is lost: stop serving it at once then."""
        if not self.holds(tenure) or tenure.phase is Phase.ACQUIRING:
            return False
        if self.is_own(record) and record is not None and record.epoch == tenure.epoch:
            return False
        if tenure.phase in (Phase.RELEASING, Phase.SPLITTING) and record is None:
            return False  # our own deletion, perhaps before its answer: the release or split concludes
        del self._tenures[tenure.bundle]
        self.lost += 1
        return True

    def on_session_lost(self) -> list[Bundle]:
        """End all tenures with their session (rule 1), and return the bundles to stop serving at once."""
        lost = [tenure.bundle for tenure in self.owned()]
        self.lost += len(lost)
        self._tenures.clear()
        self.sessions += 1
        return lost
