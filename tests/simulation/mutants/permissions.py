"""Mistakes in how brokers use permissions: what is known for too long, what nobody looks at. Random worlds have no permissions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from cepheid_broker.authorizer import Authorizer
from cepheid_broker.protocol.connection import Connection
from cepheid_broker.protocol.listener import Listener
from tests.simulation.mutants.registry import scenario_mutant


@scenario_mutant
@contextlib.contextmanager
def use_known_permissions_for_ever() -> Iterator[None]:
    """However long metadata has been away."""

    def is_too_old(self: Authorizer, known: Any) -> bool:
        return False

    with mock.patch.object(Authorizer, "_is_too_old", is_too_old):
        yield


@scenario_mutant
@contextlib.contextmanager
def keep_open_what_a_role_may_not_use_any_more() -> Iterator[None]:
    """Permissions are only checked when something is opened."""

    def on_permissions_changed(self: Connection, tenant: str | None) -> None:
        """Nothing is closed."""

    with mock.patch.object(Connection, "on_permissions_changed", on_permissions_changed):
        yield


@scenario_mutant
@contextlib.contextmanager
def close_nothing_when_a_record_of_permissions_changes() -> Iterator[None]:
    """Open producers are closed when permissions become too old, and when their client is checked again, but not by a change."""
    original = Listener._on_permissions_changed

    def on_permissions_changed(self: Listener, tenant: str | None) -> None:
        if tenant is None:
            original(self, tenant)

    with mock.patch.object(Listener, "_on_permissions_changed", on_permissions_changed):
        yield
