"""How many connections may be open, or not authenticated yet, in all and by address."""

from __future__ import annotations

import pytest

from cepheid_broker.protocol import Arrivals, Place
from cepheid_security.failed_attempts import MAX_DELAY_S, FailedAttempts

FAR, NEAR = "192.0.2.7", "127.0.0.1"


def admitted(arrivals: Arrivals, address: str = FAR) -> Place:
    place = arrivals.admit(address)
    assert isinstance(place, Place), place
    return place


@pytest.mark.parametrize(
    ("limits", "address", "reason"),
    [
        ({"max_arriving": 2}, NEAR, r"2 connections have not authenticated yet \(connection.max_unauthenticated\)"),
        ({"max_arriving_per_address": 2}, FAR, r"2 connections of 192.0.2.7 have not authenticated yet"),
        ({"max_per_address": 2}, FAR, r"192.0.2.7 has 2 connections open \(max_connections_per_address\)"),
    ],
)
def test_a_third_connection_is_refused_until_one_of_the_two_ends(limits: dict[str, int], address: str, reason: str) -> None:
    arrivals = Arrivals(**{"max_arriving": 9, "max_arriving_per_address": 9, "max_per_address": 9, **limits})
    first, _ = admitted(arrivals, address), admitted(arrivals, address)
    with pytest.raises(AssertionError, match=reason):
        admitted(arrivals, address)
    if "max_per_address" not in limits:
        first.settle()
    first.free()
    first.free()
    admitted(arrivals, address)
    assert arrivals.arriving == 2


def test_connections_that_have_authenticated_make_room_for_others_and_loopback_has_no_limit_of_its_own() -> None:
    arrivals = Arrivals(max_arriving=3, max_arriving_per_address=1, max_per_address=2)
    admitted(arrivals).settle()
    admitted(arrivals)
    for _ in range(2):
        admitted(arrivals, "::ffff:127.0.0.1")
    assert arrivals.arriving == 3


def test_failures_of_an_address_are_answered_later_and_later_until_it_rests() -> None:
    attempts = FailedAttempts()
    delays = [attempts.note(FAR, 0.0) for _ in range(18)]
    assert delays[:12] == [0.0] * 10 + [0.25, 0.5]
    assert delays[-1] == MAX_DELAY_S
    assert attempts.note(NEAR, 0.0) == 0.0
    assert attempts.note(FAR, 61.0) == 0.0


def test_whoever_has_a_network_of_ipv6_addresses_does_not_fail_as_many_clients() -> None:
    attempts = FailedAttempts()
    assert [attempts.note(f"2001:db8::{number:x}", 0.0) for number in range(12)][-2:] == [0.25, 0.5]
    assert attempts.note("2001:db8:0:1::1", 0.0) == 0.0
