"""Ledgers and bookies over the admin API: pages, one, back from deletion, and what is refused."""

from __future__ import annotations

import json

import pytest
from click.testing import Result
from typer.testing import CliRunner

from cepheid_cli.app import app
from cepheid_cli.ledgers import preview_lines
from cepheid_metadata import keys
from tests.admin.admin_world import NAMESPACE, AdminWorld

LEDGERS = "/cepheid/v1/ledgers"


def all_ids(admin: AdminWorld, limit: int, **query: object) -> list[int]:
    ids: list[int] = []
    above: int | None = -1
    while above is not None:
        page = admin.get(LEDGERS, params={"above": above, "limit": limit, **query}).json()
        assert len(page["ledgers"]) <= limit
        ids += [view["ledger"]["ledger_id"] for view in page["ledgers"]]
        above = page["next"]
    return ids


@pytest.mark.slow
def test_pages_together_have_every_ledger_once(admin: AdminWorld) -> None:
    for number in range(5):
        assert admin.put(f"{NAMESPACE}/paged-{number}").status_code == 204
        admin.put(f"{NAMESPACE}/paged-{number}/subscription/s")  # opens it
    everything = all_ids(admin, 1000)
    assert len(everything) >= 5
    assert everything == sorted(dict.fromkeys(everything))
    for limit in (1, 2, 3):
        assert all_ids(admin, limit) == everything


def test_an_empty_ledger_of_a_deleted_topic_is_gone_and_others_come_back(admin: AdminWorld) -> None:
    topic = f"{NAMESPACE}/comes-back"
    admin.put(topic)
    admin.put(f"{topic}/subscription/s")
    (ledger,) = [
        view["ledger"]["ledger_id"]
        for view in admin.get(LEDGERS).json()["ledgers"]
        if view["ledger"]["custom"].get("topic", "").endswith("/comes-back")
    ]
    assert admin.post(f"{LEDGERS}/{ledger}/undelete").status_code == 404
    assert admin.delete(topic, params={"force": True}).status_code == 204
    assert admin.get(f"{LEDGERS}/{ledger}").status_code == 404  # nothing was in it
    assert ledger not in all_ids(admin, 100, deleted=True)


def test_a_damaged_record_is_listed_as_that_and_hides_no_other_ledger(admin: AdminWorld) -> None:
    for name in ("damaged-record", "whole-record"):
        admin.put(f"{NAMESPACE}/{name}")
        admin.put(f"{NAMESPACE}/{name}/subscription/s")
    before = all_ids(admin, 1000)
    key, store = keys.ledger_key(before[-2]), admin.standalone.broker.store
    found = admin.run(store.get(key))
    assert found is not None
    admin.run(store.put(key, b"garbage", None))
    try:
        assert all_ids(admin, 1000) == [*before[:-2], before[-1]]
        assert all_ids(admin, 1) == [*before[:-2], before[-1]]
        (damaged,) = admin.get(LEDGERS).json()["damaged"]
        assert damaged["ledger_id"] == before[-2]
        assert key in damaged["error"]

        def commands() -> list[Result]:
            words = [["list"], ["verify", "--all"], ["verify", "--all", "--json"]]
            return [CliRunner().invoke(app, ["ledgers", *each, "--admin-url", admin.standalone.admin_url]) for each in words]

        listed, verified, as_json = admin.in_thread(commands)
        assert any(line.split()[:2] == [str(before[-2]), "DAMAGED"] for line in listed.stdout.splitlines())
        assert (listed.exit_code, verified.exit_code, as_json.exit_code) == (0, 1, 1)
        assert "1 record of ledgers damaged" in verified.stdout.splitlines()[-1]
        assert json.loads(as_json.stdout)[-1]["damaged"]["ledger_id"] == before[-2]
    finally:
        admin.run(store.put(key, found.value, None))


def test_a_ledger_that_needs_no_decision_is_closed_without_loss_and_its_topic_goes_on(admin: AdminWorld) -> None:
    admin.put(f"{NAMESPACE}/decided")
    admin.put(f"{NAMESPACE}/decided/subscription/s")
    admin.publish("decided", [b"1", b"2"])
    ledger = all_ids(admin, 1000)[-1]
    path = f"{LEDGERS}/{ledger}/recover_from/bookie-1"
    preview = admin.get(path).json()
    assert (preview["state"], preview["last_entry_id"], preview["needs_decision"]) == ("OPEN", 1, False)
    assert admin.post(path).status_code == 400, "who decides says what was shown"
    assert admin.get(f"{LEDGERS}/{ledger}/recover_from/bookie-9").status_code == 503
    assert admin.get(f"{LEDGERS}/77777/recover_from/bookie-1").status_code == 404

    def command(*words: str) -> Result:
        return CliRunner().invoke(app, ["ledgers", "recover-from", str(ledger), "--bookie", "bookie-1", *words, *url], input="n\n")

    url = ["--admin-url", admin.standalone.admin_url]
    refused = admin.in_thread(command)
    assert refused.exit_code == 1
    assert "nothing would be lost: it would be closed at entry 1." in refused.stdout
    assert admin.get(path).json()["state"] == "OPEN"
    assert admin.in_thread(lambda: command("--yes")).exit_code == 0
    assert admin.get(path).json()["state"] == "CLOSED"
    assert "is already closed at entry 1" in admin.in_thread(command).stdout
    assert admin.publish("decided", [b"3"])[0][0] > ledger


def test_what_is_lost_is_said_before_it_is_asked_for() -> None:
    preview = {
        "ledger_id": 5,
        "state": "IN_RECOVERY",
        "bookie": "b3",
        "first_entry_id": 7,
        "last_entry_id": 119,
        "needs_decision": True,
        "answers": {"b1": "not known: UNKNOWN", "b2": "not known: UNKNOWN", "b3": "highest entry 119"},
        "unheard": ["b1", "b2"],
    }
    text = "\n".join(preview_lines(preview))
    assert "By the answer of b3 alone it would be closed at entry 119." in text
    assert "only at b1, b2" in text
    assert "more bookie" not in text
    assert "needs 1 more bookie that takes entries: start further ones" in "\n".join(
        preview_lines({**preview, "needed_bookies": 1})
    )


def test_bookies_are_listed_with_their_state(admin: AdminWorld) -> None:
    (bookie,) = admin.get("/cepheid/v1/bookies").json()["bookies"]
    assert (bookie["bookie_id"], bookie["state"], bookie["limbo_below"]) == ("bookie-1", "writable", 0)
    assert bookie["incarnation"]


def test_what_makes_no_sense_is_refused_with_a_reason(admin: AdminWorld) -> None:
    for path, status in (
        (f"{LEDGERS}/77777", 404),
        (f"{LEDGERS}/-1", 400),
        (f"{LEDGERS}/{1 << 63}", 400),
        (f"{LEDGERS}/orders", 400),
        (f"{LEDGERS}?limit=0", 400),
        (f"{LEDGERS}?limit=100000", 400),
        (f"{LEDGERS}?above=x", 400),
        (f"{LEDGERS}?deleted=perhaps", 400),
    ):
        answer = admin.get(path)
        assert answer.status_code == status, path
        assert answer.json()["reason"]
    assert admin.post(f"{LEDGERS}/77777/undelete").status_code == 404
    assert admin.post(f"{LEDGERS}/77777/purge").status_code == 404
