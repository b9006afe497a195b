"""Non-persistent topics over the API."""

from __future__ import annotations

from typing import Any

import pytest

from tests.admin.admin_world import AdminWorld

PATH = "/admin/v2/non-persistent/public/default"
FULL = "non-persistent://public/default"


@pytest.mark.slow
def test_they_are_made_listed_and_deleted_in_their_own_domain(admin: AdminWorld) -> None:
    assert admin.put(f"{PATH}/np-plain").status_code == 204
    assert admin.put(f"{PATH}/np-plain").status_code == 409
    assert admin.put(f"{PATH}/np-split/partitions", json=2).status_code == 204
    expected = [f"{FULL}/np-plain", f"{FULL}/np-split-partition-0", f"{FULL}/np-split-partition-1"]
    assert [topic for topic in admin.get(PATH).json() if "/np-" in topic] == expected
    assert admin.get(f"{PATH}/partitioned").json() == [f"{FULL}/np-split"]
    listed = "/admin/v2/namespaces/public/default/topics"
    assert set(expected) <= set(admin.get(f"{listed}?mode=NON_PERSISTENT").json())
    assert set(expected) <= set(admin.get(f"{listed}?mode=ALL").json())
    for stored in (admin.get(listed).json(), admin.get("/admin/v2/persistent/public/default").json()):
        assert not [topic for topic in stored if "/np-" in topic]
    assert admin.get("/admin/v2/persistent/public/default/np-plain/stats").status_code == 404
    assert admin.post(f"{PATH}/np-split/partitions", json=3).status_code == 204
    assert admin.get(f"{PATH}/np-split/partitions").json()["partitions"] == 3
    assert admin.delete(f"{PATH}/np-plain").status_code == 204
    assert admin.delete(f"{PATH}/np-split/partitions").status_code == 204
    assert [topic for topic in admin.get(PATH).json() if "/np-" in topic] == []


def test_statistics_show_clients_and_drops(admin: AdminWorld) -> None:
    client = admin.in_thread(lambda: admin.wire_client(f"{FULL}/np-stats"))
    try:
        admin.in_thread(lambda: client.subscribe("s", shared=True, earliest=True))
        admin.in_thread(client.open_producer)
        stats = admin.get(f"{PATH}/np-stats/stats").json()
        assert stats["msgDropRate"] == 0.0
        assert stats["publishers"][0]["msgDropRate"] == 0.0
        assert stats["subscriptions"]["s"]["msgDropRate"] == 0.0
        assert stats["subscriptions"]["s"]["type"] == "Shared"
        assert stats["subscriptions"]["s"]["msgBacklog"] == 0
        assert admin.get(f"{PATH}/np-stats/subscriptions").json() == ["s"]
        assert admin.get(f"{PATH}/np-stats/internalStats").json()["numberOfEntries"] == 0
        assert admin.delete(f"{PATH}/np-stats").status_code == 412
        assert admin.put(f"{PATH}/np-stats/unload").status_code == 204
    finally:
        client.close()
    assert admin.delete(f"{PATH}/np-stats?force=true").status_code == 204


def test_partitions_are_summed(admin: AdminWorld) -> None:
    assert admin.put(f"{PATH}/np-sum/partitions", json=2).status_code == 204
    stats = admin.get(f"{PATH}/np-sum/partitioned-stats").json()
    assert (stats["metadata"]["partitions"], len(stats["partitions"]), stats["msgDropRate"]) == (2, 2, 0.0)
    assert admin.get(f"{PATH}/np-sum/partitioned-stats?perPartition=false").json()["partitions"] == {}
    assert admin.delete(f"{PATH}/np-sum/partitions").status_code == 204


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "np-none/stats", None, 404),
        ("GET", "np-none/subscriptions", None, 404),
        ("DELETE", "np-none", None, 404),
        ("GET", "np-here/partitioned-stats", None, 404),
        ("GET", "np-here-partition-0/partitioned-stats", None, 412),
        ("PUT", "np-here/subscription/s", None, 400),
        ("POST", "np-here/subscription/s/skip_all", None, 405),
        ("POST", "np-here/subscription/s/resetcursor/1", None, 405),
        ("GET", "np-here/lastMessageId", None, 405),
        ("POST", "np-here/terminate", None, 406),
        ("DELETE", "np-here/truncate", None, 412),
    ],
)
def test_what_needs_stored_entries_has_the_status_that_tools_know(
    admin: AdminWorld, method: str, path: str, body: Any, status: int
) -> None:
    admin.put(f"{PATH}/np-here")
    answer = admin.ask(method, f"{PATH}/{path}", **({} if body is None else {"json": body}))
    assert answer.status_code == status, answer.text
    assert answer.json()["reason"]


def test_lookup_finds_them(admin: AdminWorld) -> None:
    answer = admin.get("/lookup/v2/topic/non-persistent/public/default/np-lookup")
    assert answer.json()["brokerUrl"] == admin.standalone.service_url
