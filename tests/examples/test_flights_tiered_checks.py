"""The checks of `cepheid demo-tiered`, each of which must be able to fail."""

from __future__ import annotations

from typing import Any

import pytest

from examples.flights_spark.expected import Delays, Expected
from examples.flights_tiered import checks
from examples.flights_tiered.consuming import Seen

EXPECTED = Expected({("AA", 6): Delays(2, 10), ("AA", 7): Delays(1, 5), ("UA", 6): Delays(1, 3)}, {}, 5)
SOUND: dict[str, Any] = {"begun": 0, "complete": 3, "off_bookies": 3, "ended": 3}
REPORT = "x: restored\n  2 ledgers, 4 entries, 9 B; 1 cursor, 3 s old\n  never offloaded, lost: 1 ledger (9), 5 entries, 100 B"


@pytest.mark.parametrize(
    ("seen", "held"),
    [
        (Seen([0, 1, 2]), True),
        (Seen([0, 1]), False),
        (Seen([0, 1, 1, 2]), False),
        (Seen([0, 2, 1]), False),
        (Seen([0, 1, 2], changed=1), False),
    ],
)
def test_every_event_once_in_order_and_unchanged(seen: Seen, held: bool) -> None:
    assert checks.check_seen("x", seen, range(3)).held is held


@pytest.mark.parametrize(
    ("chain", "objects", "held"), [(SOUND, 3, True), (SOUND, 4, False), ({**SOUND, "off_bookies": 2}, 3, False)]
)
def test_every_ledger_is_one_object_and_on_no_bookie(chain: dict[str, Any], objects: int, held: bool) -> None:
    assert checks.check_offloaded(chain, objects).held is held


@pytest.mark.parametrize(("begun", "complete", "held"), [(1, 1, True), (0, 1, False), (1, 3, False)])
def test_the_kill_hits_an_upload(begun: int, complete: int, held: bool) -> None:
    assert checks.check_crash({"begun": begun, "complete": complete, "ended": 3}).held is held


@pytest.mark.parametrize(
    ("rows", "held"),
    [([("AA", 3, 5.0), ("UA", 1, 3.0)], True), ([("AA", 3, 5.0)], False), ([("AA", 3, 5.1), ("UA", 1, 3.0)], False)],
)
def test_mean_delays_equal_the_source_files(rows: list[tuple[str, int, float]], held: bool) -> None:
    assert checks.check_carriers("x", rows, EXPECTED).held is held


@pytest.mark.parametrize(
    ("verified", "swept", "held"),
    [
        ("3 objects, 1 kB: 3 valid, 0 bad, 0 not known", "0 objects, 0 B: would be deleted", True),
        ("3 objects, 1 kB: 2 valid, 1 bad, 0 not known", "0 objects, 0 B: would be deleted", False),
        ("3 objects, 1 kB: 3 valid, 0 bad, 0 not known", "1 object, 9 B: would be deleted", False),
    ],
)
def test_the_bucket_is_sound_and_has_no_orphans(verified: str, swept: str, held: bool) -> None:
    assert checks.check_bucket(verified, swept).held is held


@pytest.mark.parametrize(("report", "held"), [(REPORT, True), (REPORT.partition("\n  never")[0], False)])
def test_the_report_names_what_was_lost(report: str, held: bool) -> None:
    assert checks.check_report(report, 5).held is held
