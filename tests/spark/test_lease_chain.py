"""The whole life of a lease at a server: renewed it outlives its time, silent it is dropped, and what it held is trimmed."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from cepheid_broker.topics import lease_expiry
from cepheid_decode import MessagePosition, PlanSource
from cepheid_scan.admin_http import AdminHttp
from cepheid_spark.lease import LEASE_PROPERTY, Lease
from cepheid_spark.lease_keeper import LeaseKeeper
from tests.admin.admin_world import NAMESPACE, AdminWorld, running_admin

pytestmark = pytest.mark.slow

TOPIC = "persistent://public/default/chain"
TTL_S = 1.5


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_a_lease_that_nobody_renews_is_dropped_and_what_it_held_is_trimmed(tmp_path: Path) -> None:
    assert lease_expiry.LEASE_PROPERTY == LEASE_PROPERTY
    with running_admin(tmp_path) as admin, closing(AdminHttp(PlanSource(admin_url=admin.standalone.admin_url))) as http:
        leases = admin.standalone.broker.leases
        leases._check_s, leases._silence_s = 0.05, 1.0
        admin.in_thread(lambda: hold_and_let_go(admin, http))
        assert leases.expired == 1


def hold_and_let_go(admin: AdminWorld, http: AdminHttp) -> None:
    def ask(method: str, what: str) -> dict[str, list[dict[str, int]]]:
        return http.request(method, f"{NAMESPACE}/chain{what}") or {}

    def ledgers() -> list[int]:
        return [ledger["ledgerId"] for ledger in ask("GET", "/internalStats")["ledgers"]]

    def expires_ms() -> int:
        return int(http.request("GET", f"{NAMESPACE}/chain/subscription/s/properties")[LEASE_PROPERTY])

    keeper = LeaseKeeper(Lease(http, "s", TTL_S), renew_s=0.1)
    for number in range(3):
        with admin.wire_client(TOPIC) as client:
            client.open_producer()
            client.send(0, b"%d" % number)
            if number == 0:
                keeper.hold({TOPIC: MessagePosition(ledgers()[0], 0)})
                first_end_ms = expires_ms()
        ask("PUT", "/unload")
    held = ledgers()
    assert len(held) == 4
    wait_until(lambda: expires_ms() > first_end_ms + 2 * TTL_S * 1000, "renewed beyond twice its time")
    ask("POST", "/trim")
    assert ledgers() == held
    assert keeper.failures == 0
    keeper.close()
    wait_until(lambda: not ask("GET", "/subscriptions"), "silent, it is dropped")
    ask("POST", "/trim")
    wait_until(lambda: ledgers() == held[-1:], "nothing keeps what it held")
