"""Plans of a secured cluster that is being upgraded: readers and brokers of the release before know no signed tickets."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from cepheid_broker.admin import plan
from cepheid_metadata.ticket_keyring import TicketKeyring
from cepheid_metadata.upgrade import StorageFormat, storage_format_record
from tests.admin.secured_world import A_TOPICS, SecuredWorld, running_secured

PLAN = "/cepheid/v1/plan?topic=a/n/mine"


def plan_of(world: SecuredWorld) -> dict[str, Any]:
    found: dict[str, Any] = world.do("root", "GET", PLAN)
    return found


def wait_format(world: SecuredWorld, format: int) -> dict[str, Any]:
    deadline = time.monotonic() + 10
    while (found := plan_of(world))["format"] != format and time.monotonic() < deadline:
        time.sleep(0.02)
    assert found["format"] == format
    return found


def test_plans_have_both_kinds_of_permission_until_the_upgrade_is_finished(tmp_path: Path) -> None:
    with running_secured(tmp_path) as world:
        world.do("a-user", "PUT", f"{A_TOPICS}/mine/subscription/s")  # the topic is opened, and has a ledger
        finished = wait_format(world, plan.FORMAT_WITH_TICKETS)
        assert finished["read_ticket"] == ""
        assert all("ticket" in ledger and "master_key" not in ledger for ledger in finished["plans"][0]["ledgers"])

        store = world.admin.standalone.broker.store
        world.admin.run(storage_format_record(store).replace(None, StorageFormat(storage_format=2), None))
        upgrading = wait_format(world, plan.FORMAT)
        assert upgrading["read_ticket"].startswith("ct0.")
        assert upgrading["plans"][0]["ledgers"]
        assert all("ticket" in ledger and "master_key" in ledger for ledger in upgrading["plans"][0]["ledgers"])

        status = world.do("root", "GET", "/cepheid/v1/upgrade")
        assert (status["storage_format"], status["newest"], status["older"]) == (2, 3, [])
        world.do("root", "POST", "/cepheid/v1/upgrade/finish")
        wait_format(world, plan.FORMAT_WITH_TICKETS)


def test_a_broker_signs_what_one_of_the_release_before_passes_on(tmp_path: Path) -> None:
    """And the other way round a plan has what the older broker and its reader look for."""
    with running_secured(tmp_path) as world:
        tickets = world.admin.standalone._serving.tickets
        assert isinstance(tickets, TicketKeyring)
        of_the_other = [{"ledgers": [{"ledger_id": 7, "open": True, "last_entry_id": -1, "master_key": "a2V5"}]}]
        world.admin.run(plan._sign_tickets(of_the_other, tickets, "a-user"))
        (ledger,) = of_the_other[0]["ledgers"]
        assert str(ledger["ticket"]).startswith("ct1.")
        assert "master_key" not in ledger
