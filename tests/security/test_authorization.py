"""The decision about permissions, by tables, and settings with which no process starts."""

from pathlib import Path

import pytest

from cepheid_bookie.secured_ports import access_of
from cepheid_security import NO_GRANTS, Grants, Need, Principal, Roles, SecurityConfigurationError, decide, usable_topics
from cepheid_security.peer_settings import BookieAccessSettings, BookieTlsSettings
from cepheid_security.settings import AuthenticationSettings, AuthorizationSettings
from cepheid_security.token_keys import TokenKey
from cepheid_security.tokens import create_token
from cepheid_wire import TopicName

ROLES = Roles(frozenset({"root"}), frozenset({"proxy", "proxy2"}), frozenset({"broker"}))
ORDERS, OTHER = "persistent://t/n/orders", "persistent://t/n/other"
GRANTS = Grants(
    tenant_admins=frozenset({"admin"}),
    namespace={"writer": frozenset({"produce"}), "reader": frozenset({"consume"}), "runner": frozenset({"functions"})},
    topics={ORDERS: {"one": frozenset({"produce", "consume"}), "two": frozenset({"consume"}), "proxy": frozenset({"produce"})}},
    subscriptions={"reserved": frozenset({"reader"}), "open": frozenset()},
)
PREFIX = Grants(namespace={"reader": frozenset({"consume"})}, subscription_auth_mode="Prefix")


def allowed(role: str, need: Need, topic: str | None = None, subscription: str | None = None, grants: Grants = GRANTS) -> bool:
    return decide(ROLES, grants, Principal(role, "token"), need, topic=topic, subscription=subscription).allowed


@pytest.mark.parametrize(
    ("role", "need", "topic", "expected"),
    [
        ("writer", Need.PRODUCE, ORDERS, True),
        ("writer", Need.CONSUME, ORDERS, False),
        ("writer", Need.PRODUCE_OR_CONSUME, ORDERS, True),
        ("reader", Need.CONSUME, ORDERS, True),
        ("reader", Need.PRODUCE, ORDERS, False),
        ("runner", Need.PRODUCE_OR_CONSUME, ORDERS, False),
        ("runner", Need.NAMESPACE_READ, None, False),
        ("one", Need.PRODUCE, ORDERS, True),
        ("one", Need.PRODUCE, OTHER, False),
        ("one", Need.PRODUCE, None, False),  # not on all topics
        ("one", Need.NAMESPACE_READ, None, True),
        ("two", Need.PRODUCE, ORDERS, False),
        ("two", Need.CONSUME, f"{ORDERS}-partition-3", True),
        ("two", Need.CONSUME, f"{ORDERS}-partition-03", False),  # a plain topic of that name
        ("two", Need.CONSUME, "non-persistent://t/n/orders", False),
        ("stranger", Need.PRODUCE_OR_CONSUME, ORDERS, False),
        ("stranger", Need.NAMESPACE_READ, None, False),
        ("stranger", Need.AUTHENTICATED, None, True),
        ("stranger", Need.NOBODY_IN_PARTICULAR, None, True),
        ("writer", Need.TENANT_ADMIN, None, False),
        ("admin", Need.TENANT_ADMIN, None, True),
        ("admin", Need.PRODUCE, OTHER, True),
        ("admin", Need.SUPER_USER, None, False),
        ("admin", Need.CLUSTER_PEER, None, False),
        ("broker", Need.CLUSTER_PEER, None, True),
        ("broker", Need.PRODUCE, ORDERS, False),
        ("Admin", Need.TENANT_ADMIN, None, False),  # roles are compared exactly
        ("", Need.PRODUCE, ORDERS, False),
    ],
)
def test_allows_what_a_rule_allows(role: str, need: Need, topic: str | None, expected: bool) -> None:
    assert allowed(role, need, topic) is expected


@pytest.mark.parametrize("need", Need)
def test_a_super_user_may_do_everything_and_a_stranger_nothing(need: Need) -> None:
    root = decide(ROLES, NO_GRANTS, Principal("root", "token"), need, topic=ORDERS)
    nobody = decide(ROLES, GRANTS, None, need, topic=ORDERS)
    assert root.allowed
    assert nobody.allowed is (need is Need.NOBODY_IN_PARTICULAR)


@pytest.mark.parametrize(
    ("role", "subscription", "grants", "expected"),
    [
        ("reader", "reserved", GRANTS, True),
        ("reader", "open", GRANTS, True),
        ("reader", "unknown", GRANTS, True),
        ("one", "reserved", GRANTS, False),  # may consume, but not with this subscription
        ("writer", "reserved", GRANTS, False),
        ("admin", "reserved", GRANTS, True),
        ("reader", "reader-1", PREFIX, True),
        ("reader", "other", PREFIX, False),
    ],
)
def test_subscriptions_narrow_who_may_consume(role: str, subscription: str, grants: Grants, expected: bool) -> None:
    assert allowed(role, Need.CONSUME, ORDERS, subscription, grants) is expected


@pytest.mark.parametrize(
    ("role", "original", "expected"),
    [
        ("proxy", "one", True),
        ("proxy", "two", False),  # the proxy may, the original principal may not
        ("proxy2", "one", False),  # the other way round
        ("proxy", None, False),
        ("proxy", "proxy2", False),
        ("one", "root", False),  # is not a proxy
        ("root", "one", False),
        ("one", "one", True),
    ],
)
def test_a_proxy_and_whom_it_speaks_for_must_both_be_allowed(role: str, original: str | None, expected: bool) -> None:
    principal = Principal(role, "token", original_role=original)
    assert decide(ROLES, GRANTS, principal, Need.PRODUCE, topic=ORDERS).allowed is expected


def test_a_test_of_many_names_answers_as_the_decision_on_each() -> None:
    names = [*(f"{each}{suffix}" for each in (ORDERS, OTHER) for suffix in ("", "-partition-1", "-partition-01"))]
    by_topic = {ORDERS: {"proxy": frozenset({"consume"})}, f"{ORDERS}-partition-1": {"one": frozenset({"produce"})}}
    roles = ("writer", "runner", "one", "two", "proxy", "admin", "root", "stranger")
    principals = [Principal(role, "token", original_role=original) for role in roles for original in (None, *roles)]
    for grants in (GRANTS, NO_GRANTS, Grants(topics=by_topic)):
        for principal in (None, *principals):
            is_usable = usable_topics(ROLES, grants, principal)
            for name in names:
                decision = decide(ROLES, grants, principal, Need.PRODUCE_OR_CONSUME, topic=name)
                assert is_usable(name) is decision.allowed, (principal, name)


@pytest.mark.parametrize(
    "local_name", ["x-partition-0", "x-partition-01", "-partition-1", "x-partition-2147483648", "x-partition-1-partition-2", "x"]
)
def test_knows_the_same_partitions_as_topic_names(local_name: str) -> None:
    topic = TopicName.parse(f"persistent://t/n/{local_name}")
    grants = Grants(topics={str(topic.base): {"two": frozenset({"consume"})}})
    assert allowed("two", Need.CONSUME, str(topic), grants=grants)
    if not topic.is_partition and "-partition-" in local_name:
        shorter = Grants(topics={f"persistent://t/n/{local_name.rpartition('-partition-')[0]}": {"two": frozenset({"consume"})}})
        assert not allowed("two", Need.CONSUME, str(topic), grants=shorter)


@pytest.mark.parametrize("grants", [GRANTS, PREFIX])
@pytest.mark.parametrize("role", ["stranger", "writer"])
def test_a_role_without_a_grant_does_not_learn_how_subscriptions_are_narrowed(role: str, grants: Grants) -> None:
    ask = (ROLES, grants, Principal(role, "token"), Need.CONSUME)
    rules = {decide(*ask, topic=ORDERS, subscription=name).rule for name in ("reserved", "open", "unknown", role)}
    assert rules == {f"role {role!r} has consume neither on the topic nor on its namespace"}


def test_the_rule_is_a_sentence_that_names_no_other_role() -> None:
    decision = decide(ROLES, GRANTS, Principal("one", "token"), Need.CONSUME, topic=ORDERS, subscription="reserved")
    assert decision.rule == "subscription 'reserved' is reserved for other roles than 'one'"
    denied = decide(ROLES, GRANTS, Principal("writer", "token"), Need.CONSUME, topic=ORDERS)
    assert denied.rule == "role 'writer' has consume neither on the topic nor on its namespace"


# Settings with which a process must not start


def test_a_broker_without_a_super_user_is_refused() -> None:
    AuthorizationSettings().check()
    AuthorizationSettings(enabled=True, super_user_roles=("root",)).check()
    with pytest.raises(SecurityConfigurationError, match=r"needs authorization.super_user_roles.*name the role of your admin"):
        AuthorizationSettings(enabled=True).check()


@pytest.mark.parametrize(
    ("role", "peers", "reason"),
    [
        ("broker", ("broker",), None),
        ("root", (), None),  # a super-user may make the calls of peers, too
        ("broker", (), "authorization.peer_roles is empty.*own_token_file there, which has the role 'broker'"),
        (None, (), "authorization.peer_roles is empty.*own_token_file there, which is not set"),
        ("", (), "own_token_file names .*, which has no token"),
    ],
)
def test_a_broker_whose_calls_others_would_refuse_does_not_start(
    tmp_path: Path, role: str | None, peers: tuple[str, ...], reason: str | None
) -> None:
    path = tmp_path / "own.token"
    path.write_text(create_token(TokenKey(None, ("HS256",), b"k" * 32), role, 0) if role else "")
    authentication = AuthenticationSettings(own_token_file=None if role is None else str(path))
    settings = AuthorizationSettings(enabled=True, super_user_roles=("root",), peer_roles=peers)
    if reason is None:
        settings.check_peers(authentication)
    else:
        with pytest.raises(SecurityConfigurationError, match=reason):
            settings.check_peers(authentication)


def test_a_bookie_without_roles_of_brokers_is_refused() -> None:
    tls = BookieTlsSettings(certificate_file="c", key_file="k", client_ca_file="a")
    assert access_of(tls, BookieAccessSettings()).cluster_roles == {"broker", "bookie"}
    with pytest.raises(SecurityConfigurationError, match=r"access.cluster_roles is empty: no broker could write"):
        access_of(tls, BookieAccessSettings(cluster_roles=()))
