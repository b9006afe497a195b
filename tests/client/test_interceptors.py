"""Interceptors, and the one that writes OpenTelemetry spans."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from opentelemetry import trace

import cepheid
import cepheid.sync
from cepheid.telemetry import Tracing
from tests.client.conftest import ClusterThread

RECEIVE_S = 30.0


class Recorder(cepheid.Interceptor):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_send(self, topic: str, properties: dict[str, str]) -> Any:
        properties["seen"] = "yes"
        return self.seen.append

    @contextmanager
    def _around(self, message: cepheid.Message[Any]) -> Iterator[None]:
        self.seen.append(f"begin {message.data.decode()}")
        try:
            yield
        except ZeroDivisionError:
            self.seen.append("failed")
            raise
        else:
            self.seen.append("done")

    def processing(self, message: cepheid.Message[Any]) -> AbstractContextManager[object]:
        return self._around(message)


class Broken(cepheid.Interceptor):
    def on_send(self, topic: str, properties: dict[str, str]) -> Any:
        raise RuntimeError("on_send")

    def processing(self, message: cepheid.Message[Any]) -> AbstractContextManager[object]:
        raise RuntimeError("processing")


async def test_interceptors_see_what_is_sent_and_processed(cluster: ClusterThread, topic: str) -> None:
    recorder = Recorder()
    async with cepheid.connect(cluster.url, interceptors=[Broken(), recorder]) as client:
        async with client.consumer(topic, "s", type="shared") as consumer, client.producer(topic) as producer:
            first = await producer.send(b"1", properties={"own": "property"})
            producer.send_nowait(b"2")
            with pytest.raises(cepheid.UsageError) as refused:
                await producer.send("text")  # type: ignore[arg-type]
            assert recorder.seen == [first, None, refused.value]
            recorder.seen.clear()
            message = await consumer.receive(RECEIVE_S)
            assert message.properties == {"own": "property", "seen": "yes"}
            with pytest.raises(ZeroDivisionError):
                async with message.processing():
                    _ = 1 / 0
            handled = asyncio.Event()

            async def handle(message: cepheid.Message[bytes]) -> None:
                handled.set()

            worker = asyncio.ensure_future(consumer.run(handle))
            await handled.wait()
            worker.cancel()
            await asyncio.wait([worker])
            assert recorder.seen == ["begin 1", "failed", "begin 2", "done"]


async def test_a_dead_letter_keeps_the_properties_of_its_message(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer(topic) as producer:
        await producer.send(b"1", properties={"seen": "by another service"})
    async with cepheid.connect(cluster.url, interceptors=[Recorder()]) as client:
        async with (
            client.consumer(f"{topic}-s-DLQ", "dead") as dead,
            client.consumer(topic, "s", type="shared", start="earliest", dead_letters=cepheid.DeadLetters(after=1)) as consumer,
        ):
            for _ in range(2):
                consumer.nack(await consumer.receive(RECEIVE_S), delay=0)
            assert (await dead.receive(RECEIVE_S)).properties["seen"] == "by another service"


def test_blocking_clients_have_interceptors_too(cluster: ClusterThread, topic: str) -> None:
    recorder = Recorder()
    with cepheid.sync.connect(cluster.url, interceptors=[recorder]) as client, client.consumer(topic, "s") as consumer:
        with client.producer(topic) as producer:
            first = producer.send(b"1")
        with consumer.processing(consumer.receive(RECEIVE_S)):
            pass
        assert recorder.seen == [first, "begin 1", "done"]


class Spans(trace.TracerProvider):
    """What the SDK does, as far as it is needed: spans with ids, children of the current one."""

    def __init__(self) -> None:
        self.started: list[tuple[str, int, int]] = []  # name, trace, parent

    def get_tracer(self, *_: Any, **__: Any) -> Any:
        return self

    def start_span(self, name: str, context: Any = None, **_: Any) -> trace.Span:
        parent = trace.get_current_span(context).get_span_context()
        trace_id = parent.trace_id or 7 + len(self.started)
        self.started.append((name.split()[0], trace_id, parent.span_id))
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        return trace.NonRecordingSpan(trace.SpanContext(trace_id, len(self.started), is_remote=False, trace_flags=flags))

    @contextmanager
    def start_as_current_span(self, name: str, **arguments: Any) -> Iterator[trace.Span]:
        with trace.use_span(span := self.start_span(name, **arguments)):
            yield span


async def test_a_trace_goes_on_where_the_message_is_processed(cluster: ClusterThread, topic: str) -> None:
    spans = Spans()
    async with cepheid.connect(cluster.url, interceptors=[Tracing(spans)]) as client:
        async with client.consumer(topic, "s") as consumer, client.producer(topic) as producer:
            with spans.start_as_current_span("request"):
                await producer.send(b"1")
            async with (await consumer.receive(RECEIVE_S)).processing():
                await producer.send(b"2")
    assert spans.started == [("request", 7, 0), ("send", 7, 1), ("process", 7, 2), ("send", 7, 3)]
