"""The official `pulsar-client`, unmodified, with the settings of the demos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pulsar


def connect(service_url: str, log_path: Path) -> pulsar.Client:
    """Open a client that logs to a file, because it logs a lot when its server is killed."""
    logger = pulsar.FileLogger(pulsar.LoggerLevel.Warn, str(log_path))
    return pulsar.Client(service_url, operation_timeout_seconds=60, logger=logger)


def create_producer(client: pulsar.Client, topic: str, **settings: Any) -> pulsar.Producer:
    """Open a producer that batches and never gives up: the client itself resends after a crash of the server.

    `settings` are further arguments of the client's `create_producer`.
    """
    return client.create_producer(
        topic,
        send_timeout_millis=0,
        block_if_queue_full=True,
        max_pending_messages=1_500,
        batching_enabled=True,
        batching_max_messages=500,
        batching_max_allowed_size_in_bytes=128 * 1024,
        batching_max_publish_delay_ms=2,
        **settings,
    )
