"""Schemas over HTTP: shapes and statuses that tools decide by, versions, deletion, names of every kind."""

from __future__ import annotations

import base64
import json
from typing import Any
from urllib.parse import quote

import pytest

from cepheid_broker.schemas import MAX_SCHEMA_BYTES
from tests.admin.admin_world import NAMESPACE, AdminWorld
from tests.schemas.schema_examples import field, record

SCHEMAS = "/admin/v2/schemas/public/default"
ID = record(field("id", "long"))
ID_NAME = record(field("id", "long"), field("name", "string", default=""))
ID_TEXT = record(field("id", "string"))


def payload(document: Any, kind: str = "AVRO", **properties: str) -> dict[str, Any]:
    return {"type": kind, "schema": json.dumps(document), "properties": properties}


def upload(admin: AdminWorld, topic: str, document: Any) -> None:
    answer = admin.post(f"{SCHEMAS}/{topic}/schema", json=payload(document))
    assert answer.status_code == 200, answer.text


def test_the_life_of_a_schema(admin: AdminWorld) -> None:
    path = f"{SCHEMAS}/life"
    for part in ("schema", "schema/0", "schemas"):
        none = admin.get(f"{path}/{part}")
        assert (none.status_code, list(none.json())) == (404, ["reason"])
    made = admin.post(f"{path}/schema", json=payload(ID, team="a"))
    assert (made.status_code, base64.b64decode(made.json()["version"])) == (200, bytes(8))
    shown = admin.get(f"{path}/schema").json()
    assert shown.pop("timestamp") > 1_600_000_000_000
    assert shown == {"version": 0, "type": "AVRO", "data": json.dumps(ID), "properties": {"team": "a"}}
    upload(admin, "life", ID)
    upload(admin, "life", ID_NAME)
    assert admin.get(f"{path}/schema").json()["version"] == 1
    assert admin.get(f"{path}/schema/0").json()["data"] == json.dumps(ID)
    assert admin.get(f"{path}/schema/2").status_code == 404
    assert [row["version"] for row in admin.get(f"{path}/schemas").json()["getSchemaResponses"]] == [0, 1]
    deleted = admin.delete(f"{path}/schema")
    assert (deleted.status_code, deleted.json()) == (200, {"version": 2})
    assert admin.get(f"{path}/schema").status_code == 404
    assert admin.get(f"{path}/schemas").status_code == 404
    assert admin.get(f"{path}/schema/0").status_code == 200
    assert admin.delete(f"{path}/schema").status_code == 404
    assert admin.delete(f"{path}/schema?force=true").json() == {"version": 3}
    assert admin.get(f"{path}/schema/0").status_code == 404


def test_properties_are_always_there(admin: AdminWorld) -> None:
    """Without them a C++ client over HTTP fails (protocol.md §8)."""
    for number, body in enumerate(({"type": "STRING"}, {"type": "STRING", "schema": None, "properties": None})):
        assert admin.post(f"{SCHEMAS}/bare-{number}/schema", json=body).status_code == 200
        shown = admin.get(f"{SCHEMAS}/bare-{number}/schema").json()
        assert (shown["type"], shown["data"], shown["properties"]) == ("STRING", "", {})


def test_what_is_incompatible_is_409_and_names_the_field(admin: AdminWorld) -> None:
    upload(admin, "clash", ID)
    answer = admin.post(f"{SCHEMAS}/clash/schema", json=payload(ID_TEXT))
    assert answer.status_code == 409
    assert "field 'id': the new schema has string, version 0 has long" in answer.json()["reason"]
    assert len(admin.get(f"{SCHEMAS}/clash/schemas").json()["getSchemaResponses"]) == 1


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (payload(record(field("x", "strng"))), 422, "field 'x': unknown type 'strng'"),
        ({"type": "AVRO", "schema": "{"}, 422, "is not JSON"),
        ({"type": "AVRO"}, 422, "is not JSON"),
        ({"type": "FOO", "schema": ""}, 422, "'FOO' is not a type"),
        ({"type": "BYTES", "schema": ""}, 422, "BYTES is for topics without a schema"),
        ({"type": "KEY_VALUE", "schema": "[]"}, 422, '{"key": …, "value": …}'),
        ({"type": "INT32", "schema": "text"}, 422, "has no definition"),
        ({"schema": "{}"}, 400, "body.type"),
        (7, 400, "body"),
        (None, 400, "body"),
        ({"type": "EXTERNAL", "schema": "x" * (MAX_SCHEMA_BYTES + 1)}, 422, str(MAX_SCHEMA_BYTES)),
        ({"type": "EXTERNAL", "schema": "x" * (4 * MAX_SCHEMA_BYTES)}, 413, str(4 * MAX_SCHEMA_BYTES)),
    ],
)
def test_bad_bodies(admin: AdminWorld, body: Any, status: int, says: str) -> None:
    for call in ("schema", "compatibility", "version"):
        answer = admin.post(f"{SCHEMAS}/bad-bodies/{call}", json=body)
        assert (answer.status_code, says in answer.json()["reason"]) == (status, True), answer.text


def test_compatibility_is_tested_without_registering(admin: AdminWorld) -> None:
    upload(admin, "tested", ID)
    path = f"{SCHEMAS}/tested/compatibility"
    good = admin.post(path, json=payload(ID_NAME))
    assert (good.status_code, good.json()) == (202, {"compatibility": True, "schemaCompatibilityStrategy": "FULL"})
    bad = admin.post(path, json=payload(ID_TEXT))
    assert (bad.status_code, bad.json()["compatibility"], bad.json()["schemaCompatibilityStrategy"]) == (202, False, "FULL")
    assert "field 'id'" in bad.json()["reason"]
    assert admin.get(f"{SCHEMAS}/tested/schema").json()["version"] == 0


def test_the_version_of_a_definition(admin: AdminWorld) -> None:
    upload(admin, "which", ID)
    upload(admin, "which", ID_NAME)
    reordered = {"type": "AVRO", "schema": json.dumps(dict(reversed(ID.items())), indent=2)}
    assert admin.post(f"{SCHEMAS}/which/version", json=reordered).json() == {"version": 0}
    assert admin.post(f"{SCHEMAS}/which/version", json=payload(ID_TEXT)).status_code == 404


def test_a_key_value_schema_is_shown_and_taken_as_json(admin: AdminWorld) -> None:
    properties = {"key.schema.type": "STRING", "value.schema.type": "AVRO", "kv.encoding.type": "SEPARATED"}
    body = {"type": "KEY_VALUE", "schema": json.dumps({"key": "", "value": ID}), "properties": properties}
    assert admin.post(f"{SCHEMAS}/pairs/schema", json=body).status_code == 200
    shown = admin.get(f"{SCHEMAS}/pairs/schema").json()
    assert (shown["type"], shown["properties"]) == ("KEY_VALUE", properties)
    assert json.loads(shown["data"]) == {"key": "", "value": ID}
    assert admin.post(f"{SCHEMAS}/pairs/version", json={**body, "schema": shown["data"]}).json() == {"version": 0}


@pytest.mark.parametrize("name", ["a/b", "ä+ö", "100%", "x y", "schema", "%2F"])
def test_names_are_decoded_twice(admin: AdminWorld, name: str) -> None:
    """Clients escape once or twice; only a name with an escape in it needs twice."""
    if name != "a/b":  # no topic of the binary protocol has it
        twice = quote(quote(name, safe=""), safe="")
        assert admin.post(f"{SCHEMAS}/{twice}/schema", json=payload(ID)).status_code == 200
        assert admin.get(f"{SCHEMAS}/{twice}/schema").status_code == 200
    else:
        assert admin.get(f"{SCHEMAS}/{quote(name, safe='')}/schema").status_code == 412


def test_partitions_have_the_schema_of_their_topic(admin: AdminWorld) -> None:
    assert admin.put(f"{NAMESPACE}/split/partitions", json=3).status_code == 204
    upload(admin, "split-partition-1", ID)
    assert admin.get(f"{SCHEMAS}/split/schema").json()["version"] == 0
    assert admin.delete(f"{NAMESPACE}/split/partitions").status_code == 204
    assert admin.get(f"{SCHEMAS}/split/schema").status_code == 404


def test_a_schema_goes_with_its_topic_and_its_namespace(admin: AdminWorld) -> None:
    assert admin.put(f"{NAMESPACE}/gone").status_code == 204
    upload(admin, "gone", ID)
    assert admin.delete(f"{NAMESPACE}/gone").status_code == 204
    assert admin.get(f"{SCHEMAS}/gone/schema").status_code == 404
    for _ in range(2):  # the second time nothing of the first is left
        assert admin.put("/admin/v2/namespaces/public/short-lived").status_code == 204
        path = "/admin/v2/schemas/public/short-lived/never-made/schema"
        assert admin.get(path).status_code == 404
        assert admin.post(path, json=payload(ID)).status_code == 200
        assert admin.delete("/admin/v2/namespaces/public/short-lived").status_code == 204


def test_an_upload_needs_a_namespace_and_is_not_held_to_the_policy_for_clients(admin: AdminWorld) -> None:
    assert admin.post("/admin/v2/schemas/public/nowhere/t/schema", json=payload(ID)).status_code == 404
    assert admin.put("/admin/v2/namespaces/public/closed").status_code == 204
    assert admin.post("/admin/v2/namespaces/public/closed/isAllowAutoUpdateSchema", json=False).status_code == 204
    assert admin.post("/admin/v2/schemas/public/closed/t/schema", json=payload(ID)).status_code == 200


def test_a_strategy_of_the_topic_or_namespace_decides(admin: AdminWorld) -> None:
    assert admin.put("/admin/v2/namespaces/public/strategies").status_code == 204
    path = "/admin/v2/schemas/public/strategies/t"
    assert admin.post(f"{path}/schema", json=payload(ID)).status_code == 200
    strategy = "/admin/v2/namespaces/public/strategies/schemaCompatibilityStrategy"
    for name, status in (("ALWAYS_INCOMPATIBLE", 409), ("UNDEFINED", 409), ("ALWAYS_COMPATIBLE", 200)):
        assert admin.put(strategy, json=name).status_code == 204
        assert admin.post(f"{path}/schema", json=payload(ID_TEXT)).status_code == status
    tested = admin.post(f"{path}/compatibility", json=payload(record(field("id", "boolean")))).json()
    assert tested == {"compatibility": True, "schemaCompatibilityStrategy": "ALWAYS_COMPATIBLE"}
