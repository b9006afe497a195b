"""Where processes run: racks in regions, and how far they are apart."""

from __future__ import annotations

import re

import pytest

from cepheid_ports import ELSEWHERE, RACK_PATTERN, SAME_RACK, SAME_REGION, host_of, rack_distance, region_of


@pytest.mark.parametrize(
    ("own", "other", "distance"),
    [
        ("eu/1", "eu/1", SAME_RACK),
        ("eu/1", "eu/2", SAME_REGION),
        ("eu/1", "us/1", ELSEWHERE),
        ("1", "1", SAME_RACK),
        ("1", "2", ELSEWHERE),  # racks in no region have none in common
        ("1", "eu/1", ELSEWHERE),
        (None, None, ELSEWHERE),
        ("1", None, ELSEWHERE),
        ("/1", "/2", ELSEWHERE),  # an earlier release accepted any text
    ],
)
def test_how_far_processes_are_apart(own: str | None, other: str | None, distance: int) -> None:
    assert rack_distance(own, other) == rack_distance(other, own) == distance


@pytest.mark.parametrize(("rack", "region"), [("eu/1", "eu"), ("1", ""), ("a/b/c", "a")])
def test_the_region_of_a_rack(rack: str, region: str) -> None:
    assert region_of(rack) == region


@pytest.mark.parametrize(
    ("rack", "valid"), [("eu/1", True), ("zone a", True), ("", False), ("eu/", False), ("/1", False), ("a/b/c", False)]
)
def test_what_settings_accept(rack: str, valid: bool) -> None:
    assert (re.search(RACK_PATTERN, rack) is not None) is valid


@pytest.mark.parametrize(
    ("address", "host"), [("b1:3181", "b1"), ("[::1]:3181", "::1"), ("10.0.0.7:3181", "10.0.0.7"), ("b1", "b1")]
)
def test_the_host_of_an_address(address: str, host: str) -> None:
    assert host_of(address) == host
