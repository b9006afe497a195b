"""The admin commands as a user types them, against a server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from cepheid import UsageError
from cepheid_cli.app import app
from cepheid_ports import CepheidError
from cepheid_wire import InvalidTopicNameError
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


@pytest.mark.slow
def test_tenants_and_namespaces_come_and_go(cepheid: Commands) -> None:
    cepheid("tenants", "create", "acme")
    assert "acme" in cepheid.lines("tenants", "list")
    assert json.loads(cepheid("tenants", "show", "acme"))["allowedClusters"] == ["standalone"]
    cepheid("namespaces", "create", "acme/web")
    assert cepheid.lines("namespaces", "list", "acme") == ["acme/web"]
    assert json.loads(cepheid("namespaces", "show", "acme/web"))["bundles"]["numBundles"] == 4
    cepheid("namespaces", "unload", "acme/web")
    cepheid("namespaces", "unload", "acme/web", "--bundle", "0x00000000_0x40000000")
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
    row = next(line.split() for line in cepheid.lines("topics", "stats", "shown") if line.startswith("audit"))
    assert (row[2:5], row[-2:]) == (["0", "2", "2"], ["0", "0.0"]), "no consumers, 2 entries with 2 messages, nothing sent"
    assert row[6] == "B", "the size of the backlog"
    assert json.loads(cepheid("topics", "stats", "shown", "--json"))["subscriptions"]["audit"]["msgBacklog"] == 2
    assert cepheid("topics", "last-id", "shown").strip().endswith(":1")
    assert "audit" in json.loads(cepheid("topics", "internal-stats", "shown"))["cursors"]


@pytest.mark.slow
def test_subscriptions_with_any_name(cepheid: Commands) -> None:
    cepheid("topics", "create", "named")
    for name in ("plain", "a/b", "100%", "%2F", "sp ace", "ü?#"):
        cepheid("subscriptions", "create", "named", name)
    assert cepheid.lines("subscriptions", "list", "named") == sorted(["plain", "a/b", "100%", "%2F", "sp ace", "ü?#"])
    for name in cepheid.lines("subscriptions", "list", "named"):
        cepheid("subscriptions", "delete", "named", name)
    assert cepheid.lines("subscriptions", "list", "named") == []


def backlog(cepheid: Commands, topic: str) -> int:
    return int(json.loads(cepheid("topics", "stats", topic, "--json"))["subscriptions"]["s"]["msgBacklog"])


@pytest.mark.slow
def test_a_subscription_is_moved_by_every_command(cepheid: Commands) -> None:
    cepheid("subscriptions", "create", "moved", "s", "--at", "earliest")
    positions = cepheid.admin.publish("moved", [b"%d" % number for number in range(6)])
    cepheid("subscriptions", "skip", "moved", "s", "--count", "2")
    assert backlog(cepheid, "moved") == 4
    cepheid("subscriptions", "reset", "moved", "s", "--to", "{}:{}".format(*positions[1]))
    assert backlog(cepheid, "moved") == 5
    cepheid("subscriptions", "reset", "moved", "s", "--to", "latest")
    assert backlog(cepheid, "moved") == 0
    cepheid("subscriptions", "reset", "moved", "s", "--to", "-1h")
    assert backlog(cepheid, "moved") == 6
    cepheid("subscriptions", "expire", "moved", "s", "--older-than", "2h")
    assert backlog(cepheid, "moved") == 6, "nothing is that old"
    cepheid("subscriptions", "expire", "moved", "--older-than", "2h")
    assert backlog(cepheid, "moved") == 6, "for all of them, nothing to do is no failure"
    cepheid("subscriptions", "skip", "moved", "s", "--all")
    assert backlog(cepheid, "moved") == 0
    for words in (("--count", "1", "--all"), ()):
        with pytest.raises(CepheidError, match="say what to skip"):
            cepheid("subscriptions", "skip", "moved", "s", *words)


def test_a_backlog_is_looked_into_and_counted(cepheid: Commands) -> None:
    cepheid("subscriptions", "create", "looked-into", "s", "--at", "earliest")
    ((ledger_id, entry_id), *_) = cepheid.admin.publish("looked-into", [b"first words", b"second"])
    lines = cepheid.lines("subscriptions", "peek", "looked-into", "s")
    assert f"message-id: {ledger_id}:{entry_id}" in lines
    assert lines[-2:] == ["", "first words"]
    assert cepheid.lines("subscriptions", "peek", "looked-into", "s", "-n", "2")[-1] == "second"
    with pytest.raises(CepheidError, match="there is none at 3"):
        cepheid("subscriptions", "peek", "looked-into", "s", "-n", "3")
    counted = json.loads(cepheid("subscriptions", "backlog", "looked-into", "s"))
    assert (counted["entries"], counted["messages"], counted["aborted"]) == (2, 2, False)


@pytest.mark.slow
def test_messages_are_found_by_place_id_and_time(cepheid: Commands) -> None:
    cepheid("subscriptions", "create", "found", "s", "--at", "earliest")
    (first, second) = cepheid.admin.publish("found", [b"first", b"second"])
    assert cepheid.lines("topics", "examine", "found")[-1] == "first"
    assert cepheid.lines("topics", "examine", "found", "-n", "2")[-1] == "second"
    assert cepheid.lines("topics", "examine", "found", "--latest")[-1] == "second"
    lines = cepheid.lines("topics", "message", "found", "{}:{}".format(*second))
    assert lines[-1] == "second"
    assert "message-id: {}:{}".format(*second) in lines
    assert cepheid("topics", "find", "found", "--at", "-1h").strip() == "{}:{}".format(*first)
    for words in (("examine", "found", "-n", "3"), ("message", "found", "0:77"), ("find", "nowhere", "--at", "-1h")):
        with pytest.raises(CepheidError, match=r": 404\)"):
            cepheid("topics", *words)
    cepheid("topics", "truncate", "found")
    assert backlog(cepheid, "found") == 0


def test_subscription_properties_are_replaced(cepheid: Commands) -> None:
    cepheid("subscriptions", "create", "marked", "s")
    assert json.loads(cepheid("subscriptions", "properties", "marked", "s")) == {}
    cepheid("subscriptions", "properties", "marked", "s", "owner=billing", "note=a=b")
    assert json.loads(cepheid("subscriptions", "properties", "marked", "s")) == {"owner": "billing", "note": "a=b"}


def test_skipping_what_is_unreadable_skips_nothing_that_can_be_read(cepheid: Commands) -> None:
    cepheid("subscriptions", "create", "readable", "s", "--at", "earliest")
    cepheid.admin.publish("readable", [b"whole"])
    assert cepheid.lines("subscriptions", "skip", "readable", "s", "--unreadable") == []
    assert json.loads(cepheid("subscriptions", "why", "readable", "s", "--json"))["backlog_entries"] == 1
    with pytest.raises(CepheidError, match="one of --count N, --all and --unreadable"):
        cepheid("subscriptions", "skip", "readable", "s", "--unreadable", "--all")


def test_why_names_the_reason_and_what_ends_it(cepheid: Commands) -> None:
    cepheid("subscriptions", "create", "why", "s", "--at", "earliest")
    cepheid.admin.publish("why", [b"waiting"])
    assert cepheid.lines("subscriptions", "why", "why", "s") == [
        "s of persistent://public/default/why: no type now, 0 consumers, backlog 1 entry",
        "- no consumer is connected",
        "    ends when a consumer subscribes",
    ]
    found = json.loads(cepheid("subscriptions", "why", "why", "s", "--json"))
    assert [reason["reason"] for reason in found["reasons"]] == ["no consumer is connected"]
    with pytest.raises(CepheidError, match="does not exist"):
        cepheid("subscriptions", "why", "why", "nobody")


@pytest.mark.slow
def test_what_means_every_partition_is_asked_of_every_partition(cepheid: Commands) -> None:
    cepheid("topics", "create", "parted", "--partitions", "2")
    cepheid("subscriptions", "create", "parted", "s", "--at", "earliest")
    cepheid.admin.publish("parted-partition-1", [b"waiting"])
    assert [line.split(": ", 1)[1] for line in cepheid.lines("subscriptions", "why", "parted", "s") if line.startswith("s of")] == [
        "no type now, 0 consumers, backlog 0 entries",
        "no type now, 0 consumers, backlog 1 entry",
    ]
    assert len(json.loads(cepheid("subscriptions", "why", "parted", "s", "--json"))) == 2
    for end, entries in (("latest", [0, 0]), ("earliest", [0, 1])):
        cepheid("subscriptions", "reset", "parted", "s", "--to", end)
        counts = json.loads(cepheid("subscriptions", "backlog", "parted", "s"))
        assert [count["entries"] for count in counts.values()] == entries
    with pytest.raises(CepheidError, match="has 2 partitions: ask one of them"):
        cepheid("subscriptions", "reset", "parted", "s", "--to", "0:0")
    with pytest.raises(CepheidError, match="topic nowhere does not exist"):
        cepheid("subscriptions", "why", "nowhere", "s")


@pytest.mark.slow
def test_topics_are_ended_and_trimmed(cepheid: Commands) -> None:
    cepheid("subscriptions", "create", "over", "s", "--at", "earliest")
    (*_, last) = cepheid.admin.publish("over", [b"1", b"2"])
    cepheid("topics", "trim", "over")
    assert cepheid("topics", "terminate", "over").strip() == "{}:{}".format(*last)
    with pytest.raises(CepheidError):
        cepheid.admin.publish("over", [b"3"])
    cepheid("topics", "create", "over-parts", "--partitions", "2")
    assert [line.split()[0] for line in cepheid.lines("topics", "terminate", "over-parts")] == ["0", "1"]
    with pytest.raises(CepheidError, match="topic nowhere does not exist"):
        cepheid("topics", "terminate", "nowhere")


POLICIES = [
    ("retention", "7d,100GB", {"retentionTimeInMinutes": 10_080, "retentionSizeInMB": 102_400}),
    ("ttl", "15m", 900),
    ("dedup", "on", True),
    ("max-unacked-per-consumer", "7", 7),
    ("max-unacked-per-subscription", "9", 9),
    ("max-producers", "3", 3),
    ("max-consumers", "4", 4),
    ("max-consumers-per-subscription", "5", 5),
    ("max-subscriptions", "6", 6),
    ("subscription-types", "Shared,Key_Shared", ["Shared", "Key_Shared"]),
    ("create-subscriptions", "off", {"allowAutoSubscriptionCreation": False}),
    ("schema-compatibility", "backward", "BACKWARD"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("word", "value", "shown"), POLICIES)
def test_a_policy_is_set_shown_and_unset_on_a_topic(cepheid: Commands, word: str, value: str, shown: object) -> None:
    cepheid("topics", "create", f"ruled-{word}")
    before = json.loads(cepheid("topics", "policies", f"ruled-{word}")).get(word)
    cepheid("topics", "set", f"ruled-{word}", word, value)
    assert json.loads(cepheid("topics", "policies", f"ruled-{word}"))[word] == shown
    cepheid("topics", "unset", f"ruled-{word}", word)
    assert json.loads(cepheid("topics", "policies", f"ruled-{word}")).get(word) == before


@pytest.mark.slow
@pytest.mark.parametrize("word", [word for word, _, _ in POLICIES])
def test_a_policy_of_a_namespace_holds_for_its_topics(cepheid: Commands, word: str) -> None:
    value, shown = next((value, shown) for name, value, shown in POLICIES if name == word)
    namespace, topic = f"public/{word}", f"persistent://public/{word}/t"
    cepheid("namespaces", "create", namespace)
    cepheid("topics", "create", topic)
    cepheid("namespaces", "set", namespace, word, value)
    assert json.loads(cepheid("topics", "policies", topic))[word] == shown
    cepheid("namespaces", "unset", namespace, word)
    assert json.loads(cepheid("topics", "policies", topic)).get(word) != shown


@pytest.mark.parametrize("word", ["size-quota", "age-quota", "persistence", "inactive"])
def test_the_other_policies_have_forms_of_their_own(cepheid: Commands, word: str) -> None:
    value = {"size-quota": "10GB:hold", "age-quota": "2h:refuse", "persistence": "1/1/1", "inactive": "1d:caught-up"}[word]
    cepheid("topics", "create", f"formed-{word}")
    cepheid("topics", "set", f"formed-{word}", word, value)
    found = json.loads(cepheid("topics", "policies", f"formed-{word}"))[word]
    expected = {
        "size-quota": ("limitSize", 10 << 30),
        "age-quota": ("limitTime", 7200),
        "persistence": ("bookkeeperEnsemble", 1),
        "inactive": ("inactiveTopicDeleteMode", "delete_when_subscriptions_caught_up"),
    }
    name, wanted = expected[word]
    assert found[name] == wanted
    cepheid("topics", "unset", f"formed-{word}", word)
    with pytest.raises(CepheidError):
        cepheid("topics", "set", f"formed-{word}", word, "nonsense")


def test_a_refusal_has_the_servers_reason(cepheid: Commands) -> None:
    with pytest.raises(CepheidError, match=r"(?i)does not exist .*404"):
        cepheid("tenants", "show", "nobody")


@pytest.mark.parametrize(
    "words",
    [("tenants", "create", ".."), ("namespaces", "create", "public/."), ("topics", "create", ".."), ("namespaces", "list", ".")],
)
def test_a_name_that_paths_cannot_have_is_refused_before_anything_is_sent(words: tuple[str, ...]) -> None:
    arguments = [*words, "--admin-url", "http://127.0.0.1:9"]  # where nothing listens
    with pytest.raises((InvalidTopicNameError, UsageError), match="choose another"):
        raise CliRunner().invoke(app, arguments).exception or AssertionError
