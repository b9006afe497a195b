"""`cepheid repair`, `ledgers short`, `bookies decommission` and `recover`, against a standalone server with four bookies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from cepheid_cli.app import app
from cepheid_cli.ledger_source import AdminSource, BookiesReplacedError, NoSuchLedgerHereError
from cepheid_cli.repair import age_of_list, decommission_lines, status_lines
from cepheid_ledger import LedgerSettings
from cepheid_metadata import BookieCookie, DecommissionedBookie, bookie_cookies, decommissioned_bookies
from cepheid_metadata.repair_views import report_missing
from cepheid_metadata.rocks_store import RocksStore
from cepheid_ports import Ports
from cepheid_recovery import RecoverySettings
from tests.admin.admin_world import NAMESPACE, AdminWorld, running_admin

QUICK = RecoverySettings(poll_s=0.1, retry_s=0.1, open_ledger_grace_s=0.5)


@pytest.fixture(scope="module")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminWorld]:
    with running_admin(tmp_path_factory.mktemp("repair") / "data", bookies=4, recovery=QUICK) as world:
        yield world


def cepheid(admin: AdminWorld, *words: str) -> Result:
    url = ["--admin-url", admin.standalone.admin_url]
    return admin.in_thread(lambda: CliRunner().invoke(app, [*words, *url]))


def closed_ledger(admin: AdminWorld, topic: str) -> int:
    """The id of a ledger with two entries that a subscription needs, of a topic that was unloaded and opened again."""
    admin.put(f"{NAMESPACE}/{topic}")
    admin.put(f"{NAMESPACE}/{topic}/subscription/keeps-it")
    ledger_id = admin.publish(topic, [b"1", b"2"])[0][0]
    admin.put(f"{NAMESPACE}/{topic}/unload")
    admin.publish(topic, [b"3"])
    return ledger_id


def test_repair_is_switched_off_and_on_and_says_so(admin: AdminWorld) -> None:
    assert cepheid(admin, "repair", "off", "--reason", "moving racks").exit_code == 0
    status = cepheid(admin, "repair", "status").stdout
    assert "OFF since" in status
    assert ": moving racks; cepheid repair on" in status
    assert "automatic repair is off" in cepheid(admin, "bookies", "list").output
    cepheid(admin, "repair", "on")
    assert "repair     on" in cepheid(admin, "repair", "status").stdout


def test_a_bookie_is_decommissioned_while_it_runs(admin: AdminWorld) -> None:
    ledger_id = closed_ledger(admin, "moves")
    ledger = admin.get(f"/cepheid/v1/ledgers/{ledger_id}").json()["ledger"]
    leaving = ledger["fragments"][0]["ensemble"][0]
    said = cepheid(admin, "bookies", "decommission", leaving, "--wait").stdout
    assert f"{leaving} holds nothing that is still needed: stop it, and discard its disks" in said
    after = admin.get(f"/cepheid/v1/ledgers/{ledger_id}").json()["ledger"]
    assert leaving not in after["fragments"][0]["ensemble"]
    assert cepheid(admin, "ledgers", "verify", str(ledger_id)).exit_code == 0
    assert "drained" in cepheid(admin, "bookies", "list").stdout
    refused = cepheid(admin, "bookies", "decommission", after["fragments"][0]["ensemble"][0])
    assert "ledgers need 3 writable bookies, and 2 would be left" in str(refused.exception)
    assert cepheid(admin, "bookies", "decommission", leaving, "--cancel").exit_code == 0
    assert "drained" not in cepheid(admin, "bookies", "list").stdout


def test_a_decommissioning_repeated_after_the_bookie_was_forgotten_says_that_it_is_done(admin: AdminWorld) -> None:
    record = DecommissionedBookie(bookie_id="bookie-8", incarnation="i", at_ms=0)
    admin.run(decommissioned_bookies(admin.standalone.broker.store).create("bookie-8", record))
    said = cepheid(admin, "bookies", "decommission", "bookie-8", "--wait")
    assert "bookie-8 is decommissioned: nothing refers to it any more" in said.stdout
    assert said.exit_code == 0


def test_a_recovery_that_is_asked_for_while_repair_is_off_says_when_it_begins(admin: AdminWorld) -> None:
    directories: dict[str, tuple[str, ...]] = {"data": ("/data",)}
    cookie = BookieCookie(layout_version=1, bookie_id="bookie-7", incarnation="i", cluster_id="c", directories=directories)
    admin.run(bookie_cookies(admin.standalone.broker.store).create("bookie-7", cookie))
    cepheid(admin, "repair", "off")
    said = cepheid(admin, "bookies", "recover", "bookie-7").output
    cepheid(admin, "repair", "on")
    assert "repair is off: the ledgers of bookie-7 are copied from their other replicas after `cepheid repair on`" in said


def test_a_decommissioning_is_refused_when_strict_racks_could_not_be_kept(tmp_path: Path) -> None:
    with running_admin(tmp_path / "data", bookies=4, ledger=LedgerSettings(strict_racks=True)) as strict:
        refused = cepheid(strict, "bookies", "decommission", "bookie-1")
    assert "different racks (ledger.strict_racks), and writable bookies would be left in: no rack" in str(refused.exception)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("bookies", "decommission", "bookie-9"), "there is no bookie bookie-9; known are bookie-1"),
        (("bookies", "decommission", "bookie-1", "--cancel"), "bookie-1 is not being decommissioned"),
        (("bookies", "recover", "bookie-9"), "there is no bookie bookie-9"),
        (("bookies", "recover", "bookie-1"), "bookie-1 is registered, so nothing needs to be recovered"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(admin: AdminWorld, words: tuple[str, ...], reason: str) -> None:
    said = str(cepheid(admin, *words).exception)
    assert reason in said
    assert "topic" not in said


def test_a_bad_copy_is_made_again(admin: AdminWorld) -> None:
    ledger_id = closed_ledger(admin, "decays")
    record = admin.get(f"/cepheid/v1/ledgers/{ledger_id}").json()["ledger"]
    broken = record["fragments"][0]["ensemble"][1]
    (bookie,) = [one for one in admin.standalone.bookies.bookies() if one.bookie_id == broken]

    async def forget() -> None:
        await bookie.delete_ledgers([ledger_id])
        await bookie._deletion.forget_tombstones(1 << 62)

    admin.run(forget())
    assert cepheid(admin, "ledgers", "verify", str(ledger_id)).exit_code == 1
    repaired = cepheid(admin, "ledgers", "verify", str(ledger_id), "--repair")
    assert repaired.exit_code == 0
    assert "0 bad or missing" in repaired.stdout
    assert admin.get("/cepheid/v1/repair/short").json() == {"ledgers": [], "next": None}


def test_a_repair_that_a_change_of_the_ledger_prevents_is_told_from_other_refusals(admin: AdminWorld) -> None:
    source = AdminSource(admin.standalone.admin_url)
    ledger_id = closed_ledger(admin, "changes")

    def repair(ledger_id: int, *bookies: str) -> None:
        admin.in_thread(lambda: asyncio.run(source.repair(ledger_id, list(bookies))))

    with pytest.raises(NoSuchLedgerHereError, match="ledger 999999 does not exist"):
        repair(999_999, "bookie-1")
    with pytest.raises(BookiesReplacedError, match=f"ledger {ledger_id} has no entries on bookie-9"):
        repair(ledger_id, "bookie-9")


def audit(**changes: Any) -> dict[str, Any]:
    short = {"ledgers": 0, "bytes": 0, "last_copy_entries": 0, "lost_entries": 0, **changes.pop("short", {})}
    rest = {"finished_at_ms": 0, "ledgers": 4824, "badly_placed": 0, "unreadable_records": 0, "waiting": [], "bytes_per_s": 0}
    return {"short": short, **rest, **changes}


def test_the_status_shows_progress_and_dangers() -> None:
    found = audit(short={"ledgers": 1206, "bytes": 1 << 30, "last_copy_entries": 7}, bytes_per_s=100 << 20, waiting=["b4"])
    view = {"off": None, "auditor": "b1", "audit": found, "draining": [], "draining_unreadable": ["b5"]}
    text = "\n".join(status_lines(view))
    assert "1206 ledgers, 1.0 GB of copies" in text
    assert "100.0 MB/s, 10 s to go" in text
    assert "7 entries with one copy left" in text
    assert "b4 is not registered, in its grace period" in text
    assert "cepheid bookies decommission b5 --cancel, then again" in text


def test_the_list_of_short_ledgers_says_how_old_it_is_while_repair_is_off() -> None:
    off = {"off_since_ms": 3_600_000, "reason": ""}
    text = age_of_list({"off": off, "audit": audit(short={"ledgers": 12}, finished_at_ms=7_200_000)})
    assert "ledgers that lost copies after 1970-01-01 01:00:00+00:00 are not listed" in text
    assert "the walk of 1970-01-01 02:00:00+00:00 found 12 ledgers short of copies" in text
    assert "not listed: cepheid repair on" in age_of_list({"off": off, "audit": None})


def test_a_decommissioning_says_what_holds_it_up() -> None:
    found = {"state": "draining", "ledgers_at_start": 9, "ledgers_left": 4, "bytes_left": 0, "running": True, "problem": "no room"}
    assert decommission_lines("b1", found)[1] == "  not yet possible: no room"


def test_settings_of_automatic_repair_are_read_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cepheid_cli.settings_loader import load_settings
    from cepheid_recovery.roles import AutoRecoverySettings, BookieNodeSettings

    monkeypatch.setenv("CEPHEID_BOOKIE_RECOVERY__GRACE_S", "7")
    flags = {"metadata": "zk://127.0.0.1:1", "port": 3181}
    settings = load_settings(BookieNodeSettings, flags=flags, environment_prefix="CEPHEID_BOOKIE_", file=None)
    assert settings.recovery.grace_s == 7
    alone = tmp_path / "settings.toml"
    alone.write_text('metadata = "zk://127.0.0.1:1"\n[recovery]\nledgers_at_once = 4\n')
    found = load_settings(AutoRecoverySettings, flags={}, environment_prefix="CEPHEID_AUTORECOVERY_", file=alone)
    assert found.recovery.ledgers_at_once == 4


def test_ledgers_that_metadata_lacks_are_shown_and_confirmed(tmp_path: Path) -> None:
    url = f"rocksdb:{tmp_path / 'metadata'}"

    async def report(missing: int) -> bool:
        store = await RocksStore.open(tmp_path / "metadata", Ports())
        try:
            return await report_missing(store, "bookie-1", 100, range(1, missing + 1), now_ms=0)
        finally:
            await store.aclose()

    def run(*words: str, answer: str = "") -> Result:
        return CliRunner().invoke(app, ["bookies", *words, "--metadata", url], input=answer)

    assert not asyncio.run(report(70))
    assert run("missing").stdout.split()[6:10] == ["bookie-1", "100", "70", "1..70"]
    refused = run("confirm-missing", "bookie-1", answer="n\n")
    assert "Delete 70 ledgers on bookie-1 that metadata lacks?" in refused.stdout
    assert refused.exit_code == 1
    assert not asyncio.run(report(70))
    assert run("confirm-missing", "bookie-1", "--yes").exit_code == 0
    assert asyncio.run(report(70))
    assert not asyncio.run(report(71))
