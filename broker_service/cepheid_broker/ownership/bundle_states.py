"""What one broker knows of the bundles it has or is about to have, without I/O.

           begin_acquire         on_acquired                begin_release             on_released
    (none) ─────────────► ACQUIRING ─────────► OWNED ─────────────────► RELEASING ─────────────► (none)
              on_not_acquired ◄──┘               ▲   on_kept ◄──────────────┘
              the record turns out to be ours ───┘
    on_session_lost, on_record with another owner or none: whatever it was, it is gone at once

    OWNED ── begin_split ──► SPLITTING ── on_split ──► its parts, OWNED          on_kept: OWNED again

Rules
1. Everything belongs to one session of the metadata store: what an older one acquired or released says nothing any more (O3).
2. A bundle is served in OWNED, and in SPLITTING: its topics stay open. Whoever is about to serve asks in the same step.
3. The record decides: one that is not ours takes the bundle away, one that is ours makes it ours, whatever we believed.
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
    """One attempt to have a bundle, from its acquisition to its end. Compared by identity: an ended one matches nothing."""

    bundle: Bundle
    phase: Phase
    epoch: int = 0
    history_version: int = 0
    """Of the record that counts epochs, as this tenure's acquisition wrote it: nobody acquired since while it is the same."""


class BundleStates:
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
        """Of this session (rule 1)."""
        return f"{self._incarnation}-{self.sessions}"

    @property
    def held(self) -> int:
        """Tenures whose record is ours."""
        return sum(tenure.phase is not Phase.ACQUIRING for tenure in self._tenures.values())

    def owned(self) -> Iterator[Tenure]:
        """Those that are being released too."""
        return iter([tenure for tenure in self._tenures.values() if tenure.phase is not Phase.ACQUIRING])

    def find(self, bundle: Bundle) -> Tenure | None:
        return self._tenures.get(bundle)

    def owns(self, bundle: Bundle) -> bool:
        """Rule 2."""
        tenure = self._tenures.get(bundle)
        return tenure is not None and tenure.phase in (Phase.OWNED, Phase.SPLITTING)

    def keeps(self, bundle: Bundle) -> bool:
        """Its record is ours: no other broker can have it."""
        tenure = self._tenures.get(bundle)
        return tenure is not None and tenure.phase is not Phase.ACQUIRING

    def holds(self, tenure: Tenure) -> bool:
        """It has not ended."""
        return self._tenures.get(tenure.bundle) is tenure

    def is_own(self, record: BundleOwner | None) -> bool:
        return record is not None and record.incarnation == self.incarnation

    def begin_acquire(self, bundle: Bundle) -> Tenure:
        assert bundle not in self._tenures, f"{bundle} is {self._tenures[bundle].phase.value} already"
        tenure = self._tenures[bundle] = Tenure(bundle, Phase.ACQUIRING)
        return tenure

    def on_acquired(self, tenure: Tenure, epoch: int, history_version: int) -> bool:
        """The record is there. False: the session ended meanwhile, and with it the record."""
        if not self.holds(tenure):
            return False
        assert tenure.phase is Phase.ACQUIRING, f"{tenure.bundle} is {tenure.phase.value}"
        tenure.phase, tenure.epoch, tenure.history_version = Phase.OWNED, epoch, history_version
        self.acquired += 1
        return True

    def on_not_acquired(self, tenure: Tenure) -> None:
        """Certainly."""
        if self.holds(tenure):
            assert tenure.phase is Phase.ACQUIRING, f"{tenure.bundle} is {tenure.phase.value}"
            del self._tenures[tenure.bundle]

    def begin_release(self, bundle: Bundle) -> Tenure | None:
        """From here on it is served to nobody new. None: it is not owned."""
        if not self.owns(bundle):
            return None
        tenure = self._tenures[bundle]
        assert tenure.phase is Phase.OWNED, f"{bundle} is {tenure.phase.value}"
        tenure.phase = Phase.RELEASING
        return tenure

    def begin_split(self, bundle: Bundle) -> Tenure | None:
        """It is served on meanwhile. None: it is not owned, or something else is done with it already."""
        tenure = self._tenures.get(bundle)
        if tenure is None or tenure.phase is not Phase.OWNED:
            return None
        tenure.phase = Phase.SPLITTING
        return tenure

    def on_split(self, tenure: Tenure, parts: Sequence[Tenure]) -> bool:
        """Their records are there, instead of that of `tenure`. False: the session ended meanwhile, and with it all records."""
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
        """The record could not be deleted, as far as we know: it is served again. If it is gone after all, `on_record` says so."""
        if self.holds(tenure) and tenure.phase in (Phase.RELEASING, Phase.SPLITTING):
            tenure.phase = Phase.OWNED

    def on_record(self, tenure: Tenure, record: BundleOwner | None) -> bool:
        """What the store says of an owned bundle now. True: it is lost, and whoever serves it has to stop at once."""
        if not self.holds(tenure) or tenure.phase is Phase.ACQUIRING:
            return False
        if self.is_own(record) and record is not None and record.epoch == tenure.epoch:
            return False
        if tenure.phase in (Phase.RELEASING, Phase.SPLITTING) and record is None:
            return False  # our own deletion, perhaps before its answer: whoever releases or splits it concludes
        del self._tenures[tenure.bundle]
        self.lost += 1
        return True

    def on_session_lost(self) -> list[Bundle]:
        """Rule 1. What has to be stopped at once."""
        lost = [tenure.bundle for tenure in self.owned()]
        self.lost += len(lost)
        self._tenures.clear()
        self.sessions += 1
        return lost
