"""Every error has its code on the wire; what repeats is logged once."""

from __future__ import annotations

import asyncio
import inspect
import logging

import pytest

import cepheid_broker.errors
import cepheid_ledger
import cepheid_managed_ledger
import cepheid_metadata
from cepheid_broker.errors import NotAllowedError, ServiceNotReadyError
from cepheid_broker.protocol.wire_errors import error_text, server_error_of
from cepheid_metadata import SessionLostError
from cepheid_ports import CepheidError
from cepheid_ports.refusal_log import MAX_KEYS, MAX_LINES, RefusalLog
from cepheid_wire import ServerError
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import subscribe


def all_errors() -> list[type[CepheidError]]:
    modules = (cepheid_broker.errors, cepheid_managed_ledger, cepheid_ledger, cepheid_metadata)
    found = {
        kind: None
        for module in modules
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, CepheidError) and kind is not CepheidError
    }
    found.pop(cepheid_broker.errors.ProtocolViolationError)  # has no answer: the connection closes
    return list(found)


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_every_error_of_ours_has_a_code(kind: type[CepheidError], caplog: pytest.LogCaptureFixture) -> None:
    code = server_error_of(kind("it happened"))
    assert not caplog.records, "an error without a code is logged as a bug"
    if kind.retriable or kind is SessionLostError:  # no use on that session, but the next one comes
        assert code is ServerError.SERVICE_NOT_READY, "clients try again"
    else:
        assert code is not ServerError.SERVICE_NOT_READY, "clients would try again for ever"


def test_an_unexpected_exception_is_logged_and_its_text_is_kept_from_the_client(caplog: pytest.LogCaptureFixture) -> None:
    assert server_error_of(KeyError("secret")) is ServerError.UNKNOWN_ERROR
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "secret" not in error_text(KeyError("secret"))
    assert error_text(NotAllowedError("why")) == "why"
    assert server_error_of(TimeoutError()) is ServerError.SERVICE_NOT_READY
    assert "retry" in error_text(ServiceNotReadyError("loading"))


async def test_repetitions_are_counted_and_told_with_the_next_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="cepheid_ports")
    refusals, now = RefusalLog(), [100.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
    for _ in range(5):
        refusals.note("producer.refused", "t", code="X")
    refusals.note("producer.refused", "other", code="X")
    assert len(caplog.records) == 2
    now[0] += 31
    refusals.note("producer.refused", "t", code="X")
    assert caplog.records[2].__dict__["repeated"] == 4
    for number in range(2 * MAX_KEYS):
        refusals.note("producer.refused", number, code="X")
    assert len(refusals._seen) <= MAX_KEYS
    monkeypatch.undo()


async def test_a_client_that_makes_up_names_fills_no_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, logger="cepheid_ports")
    refusals, now = RefusalLog(), [100.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
    for number in range(3 * MAX_LINES):
        refusals.note("producer.refused", number)
    assert len(caplog.records) == MAX_LINES
    now[0] += 31
    refusals.note("producer.refused", "t")
    refusals.note("producer.refused", "u")
    assert [record.__dict__.get("unlogged") for record in caplog.records[-2:]] == [2 * MAX_LINES, None]
    monkeypatch.undo()


async def test_what_the_log_remembers_of_a_refused_consumer_is_short() -> None:
    """A thousand names of five megabytes would be most of the memory of a small broker."""
    async with BrokerWorld() as world, await world.client() as client:
        for fields in ({"topic": "t" * 3_000_000, "subscription": "s"}, {"topic": "t", "subscription": "s" * 3_000_000}):
            ask = subscribe(**fields, consumer_id=0, request_id=1, subType=pb.CommandSubscribe.Shared)
            error = await client.ask(ask, pb.CommandError)
            assert error.error == ServerError.NOT_ALLOWED_ERROR
            assert len(error.message) < 1000
        assert len(repr(world.broker._refusals._seen)) < 5000
