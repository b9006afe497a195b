"""The admin commands as a user types them, against a server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from cepheid_cli.app import app
from cepheid_ports import CepheidError
from tests.admin.admin_world import AdminWorld, running_admin


class Commands:
    def __init__(self, admin: AdminWorld) -> None:
        self.admin = admin

    def __call__(self, *words: str) -> str:
        """What it prints; its error is raised."""
        arguments = [*words, "--admin-url", self.admin.standalone.admin_url]
        result = self.admin.in_thread(lambda: CliRunner().invoke(app, arguments))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.stdout

    def lines(self, *words: str) -> list[str]:
        return self(*words).splitlines()


@pytest.fixture(scope="module")
def cepheid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with running_admin(tmp_path_factory.mktemp("commands") / "data") as world:
        yield Commands(world)


def test_tenants_and_namespaces_come_and_go(cepheid: Commands) -> None:
    cepheid("tenants", "create", "acme")
    assert "acme" in cepheid.lines("tenants", "list")
    assert json.loads(cepheid("tenants", "show", "acme"))["allowedClusters"] == ["standalone"]
    cepheid("namespaces", "create", "acme/web")
    assert cepheid.lines("namespaces", "list", "acme") == ["acme/web"]
    assert json.loads(cepheid("namespaces", "show", "acme/web"))["bundles"]["numBundles"] == 4
    cepheid("namespaces", "delete", "acme/web")
    cepheid("tenants", "delete", "acme")
    assert "acme" not in cepheid.lines("tenants", "list")


def test_topics_come_grow_and_go(cepheid: Commands) -> None:
    cepheid("topics", "create", "plain")
    cepheid("topics", "create", "parts", "--partitions", "2")
    cepheid("topics", "grow", "parts", "3")
    listed = cepheid.lines("topics", "list")
    assert [name for name in listed if "/p" in name.removeprefix("persistent://public/default")] == [
        *(f"persistent://public/default/parts-partition-{index}" for index in range(3)),
        "persistent://public/default/plain",
    ]
    cepheid("topics", "delete", "plain")
    cepheid("topics", "delete", "parts")
    with pytest.raises(CepheidError, match="topic plain does not exist"):
        cepheid("topics", "delete", "plain")


def test_statistics_show_each_subscription(cepheid: Commands) -> None:
    cepheid("topics", "create", "shown")
    cepheid("subscriptions", "create", "shown", "audit", "--at", "earliest")
    cepheid.admin.publish("shown", [b"1", b"2"])
    table = [line.split() for line in cepheid.lines("topics", "stats", "shown")]
    assert ["audit", "-", "0", "2", "0", "0.0"] in [[row[0], "-", *row[2:]] for row in table if row[:1] == ["audit"]]
    assert json.loads(cepheid("topics", "stats", "shown", "--json"))["subscriptions"]["audit"]["msgBacklog"] == 2
    assert cepheid("topics", "last-id", "shown").strip().endswith(":1")
    assert "audit" in json.loads(cepheid("topics", "internal-stats", "shown"))["cursors"]


def test_subscriptions_with_any_name(cepheid: Commands) -> None:
    cepheid("topics", "create", "named")
    for name in ("plain", "a/b", "100%", "%2F", "sp ace", "ü?#"):
        cepheid("subscriptions", "create", "named", name)
    assert cepheid.lines("subscriptions", "list", "named") == sorted(["plain", "a/b", "100%", "%2F", "sp ace", "ü?#"])
    for name in cepheid.lines("subscriptions", "list", "named"):
        cepheid("subscriptions", "delete", "named", name)
    assert cepheid.lines("subscriptions", "list", "named") == []


def test_a_refusal_has_the_servers_reason(cepheid: Commands) -> None:
    with pytest.raises(CepheidError, match=r"(?i)does not exist .*404"):
        cepheid("tenants", "show", "nobody")
