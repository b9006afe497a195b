"""Which broker is to have a bundle that no broker has, and which brokers isolation policies allow."""

from __future__ import annotations

from collections import Counter

import pytest

from cepheid_broker.errors import NotAllowedError
from cepheid_broker.ownership.bundles import bundles_of, preference
from cepheid_broker.ownership.isolation import IsolationRules, compile_policy, names_of
from cepheid_broker.ownership.placement import LOADS_VALID_S, NEW_S, Placement, by_room
from cepheid_metadata import IsolationPolicies, IsolationPolicy
from cepheid_wire import NamespaceName

BUNDLES = bundles_of(NamespaceName("t", "n"), 128)
BROKERS = {name: {"http": f"{name}:8080"} for name in ("a", "b", "c")}


def chosen(loads: dict[str, float]) -> Counter[str]:
    return Counter(by_room(bundle, BROKERS, loads)[0] for bundle in BUNDLES)


def test_without_loads_or_with_equal_ones_all_brokers_choose_alike() -> None:
    placement = Placement()
    for bundle in BUNDLES:
        assert placement.order(bundle, BROKERS, now_s=0.0) == preference(bundle, BROKERS)
        assert by_room(bundle, BROKERS, {"a": 0.5, "b": 0.5, "c": 0.5}) == preference(bundle, BROKERS)
        assert by_room(bundle, BROKERS, {}, "c")[0] == "c"


def test_the_least_loaded_broker_gets_most_and_not_everything() -> None:
    found = chosen({"a": 0.5, "b": 0.5, "c": 0.0})
    assert found["c"] > 64
    assert min(found["a"], found["b"]) > 4


@pytest.mark.parametrize(("known_before", "age_s", "alike"), [("", 0.0, True), ("ab", NEW_S - 1, False), ("ab", NEW_S + 1, True)])
def test_a_broker_without_a_load_counts_as_the_mean_unless_it_is_new(known_before: str, age_s: float, alike: bool) -> None:
    placement = Placement()
    if known_before:
        placement.set_loads({"a": 0.4, "b": 0.6}, 0.0, registered=known_before)
    placement.set_loads({"a": 0.4, "b": 0.6}, 5.0, registered=BROKERS)
    found = Counter(placement.order(bundle, BROKERS, now_s=5.0 + age_s)[0] for bundle in BUNDLES)
    assert (found == chosen({"a": 0.4, "b": 0.6, "c": 0.5})) == alike
    assert (found == chosen({"a": 0.4, "b": 0.6, "c": 0.0})) != alike


def test_a_broker_that_registered_after_the_loads_were_told_is_new() -> None:
    placement = Placement()
    placement.set_loads({"a": 0.5, "b": 0.5}, 0.0, registered="ab")
    assert Counter(placement.order(bundle, BROKERS, now_s=20.0)[0] for bundle in BUNDLES) == chosen({"a": 0.5, "b": 0.5, "c": 0.0})


def test_a_broker_that_is_not_steady_comes_last() -> None:
    placement = Placement()
    placement.set_loads({"a": 0.5, "b": 0.5, "c": 0.0}, 0.0, registered=BROKERS, unsteady=["c"])
    assert {placement.order(bundle, BROKERS, now_s=0.0)[-1] for bundle in BUNDLES} == {"c"}


def test_a_small_difference_changes_few_choices() -> None:
    even = {bundle: by_room(bundle, BROKERS, {"a": 0.5, "b": 0.5, "c": 0.5})[0] for bundle in BUNDLES}
    changed = {bundle: by_room(bundle, BROKERS, {"a": 0.51, "b": 0.5, "c": 0.5})[0] for bundle in BUNDLES}
    assert sum(even[bundle] != changed[bundle] for bundle in BUNDLES) <= 8


def test_old_loads_are_forgotten() -> None:
    placement = Placement()
    placement.set_loads({"a": 1.0, "b": 1.0}, 10.0, registered=BROKERS)
    assert placement.loads(10.0 + LOADS_VALID_S - 1) == {"a": 1.0, "b": 1.0}
    assert placement.order(BUNDLES[0], BROKERS, now_s=10.0 + LOADS_VALID_S) == preference(BUNDLES[0], BROKERS)


def rules(**policies: IsolationPolicy) -> IsolationRules:
    return IsolationRules(IsolationPolicies(policies=policies))


POLICY = IsolationPolicy(namespaces=("t/own.*",), primary=("a",), secondary=("b",), min_limit=1)


@pytest.mark.parametrize(
    ("policy", "namespace", "brokers", "allowed"),
    [
        (POLICY, "t/own", "abc", ["a"]),
        (POLICY, "t/owned", "abc", ["a"]),
        (POLICY, "t/other", "abc", ["b", "c"]),  # nobody's primary brokers serve the rest
        (POLICY, "t/own", "bc", ["b"]),  # too few primary ones: secondary ones help
        (POLICY.replace(min_limit=2), "t/own", "abc", ["a", "b"]),
        (POLICY, "t/own", "c", ["c"]),  # none of either: topics stay available
        (POLICY, "t/other", "a", ["a"]),
        (POLICY.replace(usage_threshold=50), "t/own", "abc", ["a", "b"]),  # a is loaded
        (POLICY.replace(primary=("a:8080",)), "t/own", "abc", ["a"]),
    ],
)
def test_policies_say_which_brokers_serve_a_namespace(
    policy: IsolationPolicy, namespace: str, brokers: str, allowed: list[str]
) -> None:
    running = {name: BROKERS[name] for name in brokers}
    assert rules(p=policy).allowed(namespace, running, {"a": 0.6}) == allowed


def test_a_policy_with_a_bad_expression_is_refused_and_ignored() -> None:
    bad = POLICY.replace(namespaces=("(",))
    with pytest.raises(NotAllowedError, match="is not a valid pattern of namespaces"):
        compile_policy("p", bad)
    assert rules(p=bad).is_empty
    assert rules(p=bad).allowed("t/own", BROKERS, {}) == ["a", "b", "c"]


def test_placement_keeps_to_policies_even_where_the_last_owner_names_another_broker() -> None:
    placement = Placement()
    placement.isolation = rules(p=POLICY.replace(namespaces=("t/n",)))
    assert placement.order(BUNDLES[0], BROKERS, "c", now_s=0.0) == ["a"]


def test_a_broker_is_matched_by_its_id_its_address_and_its_host() -> None:
    assert names_of("broker-1", {"http": "h.example:8080"}) == ("broker-1", "h.example:8080", "h.example")
    assert names_of("h:1", {"https": "h:1"}) == ("h:1", "h")
