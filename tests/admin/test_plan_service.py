"""The plan service: enough to read a topic's whole history from the bookies, past the broker, and nothing that is not there."""

from __future__ import annotations

import base64
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cepheid_ledger.grpc_connection import GrpcConnection
from cepheid_rpc import MASTER_KEY_BYTES, LacRequest, ReadRequest
from cepheid_wire import split_tail
from tests.admin.admin_world import TOPICS, AdminWorld, running_admin

FULL = "persistent://public/kept"
NAMESPACE = f"{TOPICS}/public/kept"
DOCS = Path(__file__).parents[2] / "docs" / "plan-service.md"
PLAN = "/cepheid/v1/plan"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminWorld]:
    with running_admin(tmp_path_factory.mktemp("plan") / "data", bookies=3) as world:
        world.keep_everything("kept")
        yield world


def plan_of(admin: AdminWorld, topic: str, **query: Any) -> dict[str, Any]:
    answer = admin.get(PLAN, params={"topic": topic, **query})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def read_history(plan: dict[str, Any], replica: int) -> list[tuple[int, int, bytes]]:
    """Every entry that the plan names: (ledger id, entry id, payload), read from one replica of each fragment."""
    connections = {bookie: GrpcConnection(bookie, address) for bookie, address in plan["bookies"].items()}
    history: list[tuple[int, int, bytes]] = []
    try:
        for part in plan["plans"]:
            for ledger in part["ledgers"]:
                fragments = ledger["fragments"]
                ends = [fragment["first_entry_id"] - 1 for fragment in fragments[1:]] + [ledger["last_entry_id"]]
                for fragment, last in zip(fragments, ends, strict=True):
                    first = fragment["first_entry_id"]
                    connection = connections[fragment["ensemble"][replica]]
                    while first <= last:
                        request = ReadRequest(ledger["ledger_id"], first, last, ticket=plan["read_ticket"].encode())
                        async for answer in connection.read(request):
                            for group in answer.groups:
                                group.verify()
                                for entry_id in range(group.first_entry_id, group.last_entry_id + 1):
                                    payload = bytes(split_tail(group.payload(entry_id))[1])
                                    history.append((group.ledger_id, entry_id, payload))
                            assert not answer.missing
                            first = answer.next_entry_id
    finally:
        for connection in connections.values():
            await connection.aclose()
    return history


@pytest.mark.slow
@pytest.mark.parametrize("replica", [0, 1, 2])
def test_the_whole_history_is_read_from_the_bookies(cluster: AdminWorld, replica: int) -> None:
    topic = f"{FULL}/history-{replica}"
    published: list[tuple[int, int, bytes]] = []
    for round_number in range(3):  # each unload ends a ledger; the last one is being written
        payloads = [b"%d-%d" % (round_number, number) for number in range(200)]
        published += [(*where, payload) for where, payload in zip(cluster.publish(topic, payloads), payloads, strict=True)]
        if round_number < 2:
            cluster.put(f"{NAMESPACE}/history-{replica}/unload")
    plan = plan_of(cluster, topic)
    (part,) = plan["plans"]
    assert [ledger["entries"] for ledger in part["ledgers"]] == [200, 200, None], "the open ledger has no recorded end"
    assert part["end"] == {"ledger_id": published[-1][0], "entry_id": published[-1][1]}
    assert cluster.run(read_history(plan, replica)) == published


def upload_schema(cluster: AdminWorld, topic: str, definition: str) -> None:
    body = {"type": "AVRO", "schema": definition, "properties": {}}
    answer = cluster.post(f"/admin/v2/schemas/public/kept/{topic}/schema", json=body)
    assert answer.status_code == 200, answer.text


def names_in(answer: Any) -> set[str]:
    if isinstance(answer, list):
        return {name for item in answer for name in names_in(item)}
    return {name for key, value in answer.items() for name in ({key} | names_in(value))} if isinstance(answer, dict) else set()


def test_the_docs_name_every_field(cluster: AdminWorld) -> None:
    cluster.publish(f"{FULL}/documented", [b"a"])
    upload_schema(cluster, "documented", '{"type": "record", "name": "Row", "fields": []}')
    plan = plan_of(cluster, f"{FULL}/documented", schemas=True)
    example = re.search(r"```json\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert example is not None
    of_objects = {"offloaded", "url", "object_bytes", "on_bookies"}  # nothing is offloaded here
    documented = names_in({**json.loads(example[1]), "bookies": {}})
    assert names_in({**plan, "bookies": {}}) == documented - {"…"} - of_objects
    assert of_objects <= documented


def test_partitions_have_a_plan_each(cluster: AdminWorld) -> None:
    cluster.put(f"{NAMESPACE}/parted/partitions", json=3)
    for index in range(3):
        cluster.publish(f"{FULL}/parted-partition-{index}", [b"%d" % index] * (index + 1))
    plan = plan_of(cluster, f"{FULL}/parted")
    assert (plan["format"], plan["partitions"]) == (1, 3)
    assert [part["partition"] for part in plan["plans"]] == [0, 1, 2]
    payloads = [payload for _, _, payload in cluster.run(read_history(plan, 0))]
    assert payloads == [b"0", b"1", b"1", b"2", b"2", b"2"]
    single = plan_of(cluster, f"{FULL}/parted-partition-1")
    assert single["plans"] == [plan["plans"][1]]
    assert single["partitions"] == 0


def test_a_plan_follows_the_topic(cluster: AdminWorld) -> None:
    topic = f"{FULL}/followed"
    cluster.put(f"{NAMESPACE}/followed")
    (empty,) = plan_of(cluster, topic)["plans"]
    assert empty["end"]["entry_id"] == -1
    assert [ledger["last_entry_id"] for ledger in empty["ledgers"]] == [-1]
    cluster.publish(topic, [b"a"])
    (one,) = plan_of(cluster, topic)["plans"]
    assert one["incarnation"] == empty["incarnation"]
    assert one["ledgers"][-1]["last_entry_id"] == 0
    cluster.delete(f"{NAMESPACE}/followed")
    assert cluster.get(PLAN, params={"topic": topic}).status_code == 404
    cluster.put(f"{NAMESPACE}/followed")
    (anew,) = plan_of(cluster, topic)["plans"]
    assert anew["incarnation"] != one["incarnation"], "another topic of the same name"
    assert not {ledger["ledger_id"] for ledger in anew["ledgers"]} & {ledger["ledger_id"] for ledger in one["ledgers"]}


@pytest.mark.parametrize(("misses", "status"), [(2, 200), (3, 503)])
def test_a_ledger_that_is_trimmed_between_its_chain_and_its_record_is_looked_for_anew(
    cluster: AdminWorld, monkeypatch: pytest.MonkeyPatch, misses: int, status: int
) -> None:
    name = f"trimmed-{misses}"
    cluster.publish(f"{FULL}/{name}", [b"a"])
    module = importlib.import_module("cepheid_broker.admin.plan")  # its name is that of a function, too
    found_of, asked = module.ledger_records, 0

    class Records:
        def __init__(self, store: Any) -> None:
            self._records = found_of(store)

        async def get(self, ledger_id: int) -> Any:
            nonlocal asked
            asked += 1
            return None if asked <= misses else await self._records.get(ledger_id)

    monkeypatch.setattr(module, "ledger_records", Records)
    answer = cluster.get(PLAN, params={"topic": f"{FULL}/{name}"})
    assert (answer.status_code, asked) == (status, 3), answer.text
    assert status == 200 or "changed 3 times while it was read" in answer.text


@pytest.mark.slow
def test_a_topic_that_nobody_uses_is_opened_for_its_end(tmp_path: Path) -> None:
    """After a restart nothing is loaded; what was acknowledged before must be in the plan all the same."""
    with running_admin(tmp_path / "data") as admin:
        admin.keep_everything("kept")
        stored = admin.publish(f"{FULL}/idle", [b"a", b"b", b"c"])
    with running_admin(tmp_path / "data") as admin:
        plan = plan_of(admin, f"{FULL}/idle")
        found = [(ledger_id, entry_id) for ledger_id, entry_id, _ in admin.run(read_history(plan, 0))]
        assert found == stored


def test_the_key_of_a_ledger_is_the_one_that_bookies_know(cluster: AdminWorld) -> None:
    """Readers ask bookies for the LAC of an open ledger with it."""
    cluster.publish(f"{FULL}/keyed", [b"a", b"b"])
    plan = plan_of(cluster, f"{FULL}/keyed")
    ledger = plan["plans"][0]["ledgers"][-1]
    key = base64.b64decode(ledger["master_key"])
    assert len(key) == MASTER_KEY_BYTES

    async def ask(master_key: bytes) -> str:
        bookie = ledger["fragments"][-1]["ensemble"][0]
        connection = GrpcConnection(bookie, plan["bookies"][bookie])
        try:
            return (await connection.read_lac(LacRequest(ledger["ledger_id"], master_key))).status.name
        finally:
            await connection.aclose()

    assert cluster.run(ask(key)) == "OK"
    assert cluster.run(ask(bytes(MASTER_KEY_BYTES))) == "UNAUTHORIZED"


def test_every_schema_version_is_told(cluster: AdminWorld) -> None:
    """Also what is not in force any more: stored entries carry its number."""
    record = '{"type": "record", "name": "Row", "fields": [%s]}'
    older = record % ""
    newer = record % '{"name": "note", "type": ["null", "string"], "default": null}'
    cluster.publish(f"{FULL}/versions", [b"a"])
    assert plan_of(cluster, f"{FULL}/versions", schemas=True)["schemas"] == []
    upload_schema(cluster, "versions", older)
    assert cluster.delete("/admin/v2/schemas/public/kept/versions/schema").status_code == 200
    upload_schema(cluster, "versions", newer)
    schemas = plan_of(cluster, f"{FULL}/versions", schemas=True)["schemas"]
    assert [base64.b64decode(schema["data"]).decode() for schema in schemas] == [older, newer]
    versions = [base64.b64decode(schema["version"]) for schema in schemas]
    assert versions == sorted(versions)
    assert {len(version) for version in versions} == {8}
    assert plan_of(cluster, f"{FULL}/versions")["schemas"] == [], "not asked for"


def test_known_ledgers_come_without_their_fragments(cluster: AdminWorld) -> None:
    topic = f"{FULL}/again"
    for _ in range(3):
        cluster.publish(topic, [b"a", b"b"])
        cluster.put(f"{NAMESPACE}/again/unload")
    whole = plan_of(cluster, topic)["plans"][0]["ledgers"]
    known = whole[1]["ledger_id"]
    again = plan_of(cluster, topic, after=known)["plans"][0]["ledgers"]
    assert ["fragments" in ledger for ledger in again] == [False, False, True, True]
    assert again[2]["fragments"] == whole[2]["fragments"]
    assert [ledger["last_entry_id"] for ledger in again] == [1, 1, 1, -1]


def test_the_open_ledger_has_a_size(cluster: AdminWorld) -> None:
    cluster.publish(f"{FULL}/sized", [bytes(1000)] * 5)
    (ledger,) = plan_of(cluster, f"{FULL}/sized")["plans"][0]["ledgers"]
    assert ledger["open"]
    assert 5_000 < ledger["size_bytes"] < 6_000


def test_topics_and_their_partitions(cluster: AdminWorld) -> None:
    cluster.put("/admin/v2/namespaces/public/counted")
    names = [f"persistent://public/counted/{name}" for name in ("plain", "parted", "nothing", "parted-partition-1")]
    cluster.put(f"{TOPICS}/public/counted/parted/partitions", json=3)
    cluster.put(f"{TOPICS}/public/counted/plain")
    asked = cluster.get("/cepheid/v1/topics", params={"topic": names})
    assert asked.json()["topics"] == dict(zip(names, [0, 3, None, 0], strict=True))
    listed = cluster.get("/cepheid/v1/topics", params={"namespace": "public/counted"})
    assert listed.json()["topics"] == {names[0]: 0, names[1]: 3}
    assert cluster.get("/cepheid/v1/topics", params={"namespace": "public/nowhere"}).status_code == 404
    assert cluster.get("/cepheid/v1/topics").status_code == 400


@pytest.mark.parametrize(
    ("topic", "status"),
    [
        (f"{FULL}/nothing", 404),
        ("persistent://public/nowhere/t", 404),
        ("imaginary://public/default/t", 412),
        ("a/b/c/d/e", 412),
        ("non-persistent://public/default/t", 501),
    ],
)
def test_what_has_no_plan(cluster: AdminWorld, topic: str, status: int) -> None:
    answer = cluster.get(PLAN, params={"topic": topic})
    assert answer.status_code == status
    assert answer.json()["reason"]
    assert cluster.get(PLAN).status_code == 400, "no topic was named"
