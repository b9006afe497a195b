"""Mistakes about load balancing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from cepheid_broker.balancing.orders import BundleOrders, OrderRefusedError
from cepheid_broker.ownership.bundle_ownership import BundleOwnership
from cepheid_broker.ownership.bundles import Bundle
from cepheid_metadata import LeaderRecord
from tests.simulation.mutants.registry import scenario_mutant


@scenario_mutant
@contextlib.contextmanager
def carry_out_the_orders_of_any_leader() -> Iterator[None]:
    """The owner of a bundle does not look who leads: two leaders both move. Random worlds do not balance load."""

    async def accepted(self: BundleOrders, leader: LeaderRecord, name: str) -> Bundle:
        for bundle in self.ownership.owned_bundles() or ():
            if str(bundle) == name:
                return bundle
        raise OrderRefusedError(f"bundle {name} is not served by this broker any more")

    with mock.patch.object(BundleOrders, "_accepted", accepted):
        yield


@scenario_mutant
@contextlib.contextmanager
def move_to_a_broker_that_is_drained() -> Iterator[None]:
    """Nobody looks whether the target gives its bundles away, neither the orders nor the release."""
    with mock.patch.object(BundleOwnership, "leaving", ()), mock.patch.object(BundleOwnership, "_check_destination"):
        yield
