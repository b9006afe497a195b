"""Which patterns of topics are taken: one namespace, named as it is, and a regular expression of the names in it."""

from __future__ import annotations

import pytest

from cepheid_scan import BadOptionError
from cepheid_scan.planner import namespace_of_pattern


@pytest.mark.parametrize(
    ("pattern", "namespace", "matched"),
    [
        ("persistent://shop/orders/[df].*", "shop/orders", "persistent://shop/orders/daily"),
        ("shop/orders/[df].*", "shop/orders", "persistent://shop/orders/free"),
        ("[df].*", "public/default", "persistent://public/default/daily"),
        ("a|b", "public/default", "persistent://public/default/b"),
    ],
)
def test_a_pattern_names_its_namespace_or_means_the_default_one(pattern: str, namespace: str, matched: str) -> None:
    where, expression = namespace_of_pattern(pattern)
    assert str(where) == namespace
    assert expression.fullmatch(matched)
    assert not expression.fullmatch("persistent://public/other/daily")


@pytest.mark.parametrize("pattern", [".*/[df]", "a/b", "a/b/c/d", "non-persistent://public/default/.*"])
def test_what_does_not_name_one_namespace_is_refused_with_both_forms(pattern: str) -> None:
    with pytest.raises(BadOptionError, match=r"persistent://tenant/namespace/REGEX, nor REGEX alone \(of public/default\)"):
        namespace_of_pattern(pattern)
