"""`cepheid permissions` and the administrators of tenants, against a server with authorization."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from click.testing import Result
from typer.testing import CliRunner

from cepheid_cli.app import app
from tests.admin.secured_world import SecuredWorld, running_secured, token


class Commands:
    def __init__(self, world: SecuredWorld) -> None:
        self._world = world

    def run(self, role: str, *words: str) -> Result:
        arguments = [*words, "--admin-url", self._world.admin.standalone.admin_url]
        environment = {"CEPHEID_TOKEN": token(role)}
        result: Result = self._world.admin.in_thread(lambda: CliRunner().invoke(app, arguments, env=environment))
        return result

    def __call__(self, *words: str, role: str = "a-admin") -> str:
        """What a command prints that must succeed."""
        result = self.run(role, *words)
        assert result.exit_code == 0, (result.output, result.exception)
        return result.stdout


@pytest.fixture(scope="module")
def cepheid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with running_secured(tmp_path_factory.mktemp("permissions") / "data") as world:
        yield Commands(world)


def test_grants_are_made_shown_explained_and_revoked(cepheid: Commands) -> None:
    topic = "persistent://a/n/mine"
    cepheid("permissions", "grant", "ann", "a/n", "produce", "consume")
    cepheid("permissions", "grant", "bob", topic, "consume")
    cepheid("permissions", "grant", "ann", "a/n", "--subscription", "s")
    cepheid("permissions", "grant", "bob", "a/n", "--subscription", "s")
    shown = json.loads(cepheid("permissions", "list", "a/n", "--json"))
    assert shown["roles"]["ann"] == ["produce", "consume"]
    assert shown["subscriptions"] == {"s": ["ann", "bob"]}
    assert ["bob", "consume"] in [line.split() for line in cepheid("permissions", "list", topic).splitlines()]
    assert "s" in cepheid("permissions", "list", "a/n")
    assert cepheid("permissions", "why", "bob", topic, "consume") == f"allowed: role 'bob' has consume on the topic {topic}\n"
    denied = cepheid.run("a-admin", "permissions", "why", "bob", topic, "produce")
    assert (denied.exit_code, denied.stdout.split(":")[0]) == (1, "denied")
    cepheid("permissions", "revoke", "ann", "a/n", "--subscription", "s")
    cepheid("permissions", "revoke", "ann", "a/n")
    cepheid("permissions", "revoke", "bob", topic)
    shown = json.loads(cepheid("permissions", "list", "a/n", "--json"))
    assert "ann" not in shown["roles"]
    assert shown["subscriptions"] == {"s": ["bob"]}


def test_subscriptions_of_a_namespace_must_begin_with_the_role_while_that_is_on(cepheid: Commands) -> None:
    topic = "persistent://b/n/mine"
    cepheid("permissions", "grant", "carl", "b/n", "consume", role="b-admin")

    def may(subscription: str) -> bool:
        words = ("permissions", "why", "carl", topic, "consume", "--subscription", subscription)
        return cepheid.run("b-admin", *words).exit_code == 0

    cepheid("permissions", "subscription-prefix", "b/n", "on", role="b-admin")
    assert "subscriptions must begin with the role" in cepheid("permissions", "list", "b/n", role="b-admin")
    assert (may("carl-x"), may("x")) == (True, False)
    cepheid("permissions", "subscription-prefix", "b/n", "off", role="b-admin")
    assert "must begin" not in cepheid("permissions", "list", "b/n", role="b-admin")
    assert may("x")


def test_administrators_of_a_tenant_are_added_and_removed(cepheid: Commands) -> None:
    cepheid("tenants", "create", "c", "--admin-role", "ann", role="root")
    assert cepheid("tenants", "admins", "c", "--add", "bob", "--remove", "ann", role="root") == "bob\n"
    assert json.loads(cepheid("tenants", "show", "c", role="root"))["adminRoles"] == ["bob"]


@pytest.mark.parametrize(
    "words",
    [
        ("grant", "ann", "a/n"),
        ("grant", "ann", "a/n", "fly"),
        ("grant", "ann", "persistent://a/n/mine", "--subscription", "s"),
        ("grant", "ann", "a/n", "consume", "--subscription", "s"),
        ("revoke", "ann", "orders", "--subscription", "s"),
        ("subscription-prefix", "orders", "on"),
        ("subscription-prefix", "a/n", "sometimes"),
    ],
)
def test_a_command_that_makes_no_sense_is_not_sent(cepheid: Commands, words: tuple[str, ...]) -> None:
    assert cepheid.run("a-admin", "permissions", *words).exit_code == 2


def test_the_reason_of_a_denial_reaches_the_user(cepheid: Commands) -> None:
    result = cepheid.run("b-admin", "permissions", "list", "a/n")
    assert "role 'b-admin' is not an administrator of the tenant" in str(result.exception)
