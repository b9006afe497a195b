"""OpenTelemetry spans for what a client publishes and processes: `cepheid.connect(url, interceptors=[Tracing()])`.

It needs pip install 'cepheid[telemetry]'. The context of a span is sent in the properties of its message, as the configured
propagator writes it (`traceparent` by default), so that a trace continues in the service that processes the message, in any
language.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from cepheid.errors import MissingExtraError
from cepheid.interceptors import Interceptor, OnEnded, Outcome
from cepheid.message import Message

try:
    from opentelemetry import propagate, trace
except ImportError as error:
    raise MissingExtraError("Tracing needs the OpenTelemetry API: pip install 'cepheid[telemetry]'") from error


class Tracing(Interceptor):
    """A span for each `send`, until the message is stored, and one for each block of `processing` and handler of `run`.

    The span of `send_nowait` ends when the message is accepted. `provider`: the global tracer provider by default.
    """

    def __init__(self, provider: trace.TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("cepheid", tracer_provider=provider)

    def on_send(self, topic: str, properties: dict[str, str]) -> OnEnded:
        span = self._tracer.start_span(f"send {topic}", kind=trace.SpanKind.PRODUCER, attributes=_attributes("send", topic))
        propagate.inject(properties, context=trace.set_span_in_context(span))

        def end(outcome: Outcome) -> None:
            if isinstance(outcome, BaseException):
                span.record_exception(outcome)
                span.set_status(trace.StatusCode.ERROR, str(outcome))
            elif outcome is not None:
                span.set_attribute("messaging.message.id", str(outcome))
            span.end()

        return end

    def processing(self, message: Message[Any]) -> AbstractContextManager[object]:
        attributes = _attributes("process", message.topic) | {"messaging.message.id": str(message.message_id)}
        return self._tracer.start_as_current_span(
            f"process {message.topic}",
            context=propagate.extract(message.properties),
            kind=trace.SpanKind.CONSUMER,
            attributes=attributes,
        )


def _attributes(operation: str, topic: str) -> dict[str, str]:
    """Return attributes by the semantic conventions for messaging."""
    return {"messaging.system": "pulsar", "messaging.operation.type": operation, "messaging.destination.name": topic}
