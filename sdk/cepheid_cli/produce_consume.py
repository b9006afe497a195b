"""`cepheid produce` and `cepheid consume`."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape

from cepheid.arguments import ConsumerArguments
from cepheid_cli.client_security import connect_client


def produce_messages(url: str, topic: str, messages: list[str] | None, key: str) -> None:
    console = Console()
    # Without batches: every message is stored before the next one is read, and its id is that of its entry.
    with connect_client(url) as client, client.producer(topic, batching=False) as producer:
        for message in messages if messages is not None else map(str.rstrip, sys.stdin):
            stored = producer.send(message.encode(), key=key or None)
            console.print(f"{stored.ledger_id}:{stored.entry_id}", highlight=False)


def consume_messages(url: str, topic: str, subscription: str, *, count: int, shared: bool, earliest: bool) -> None:
    console = Console()
    options: ConsumerArguments = {
        "type": "shared" if shared else "exclusive",
        "start": "earliest" if earliest else "latest",
    }
    with connect_client(url) as client, client.consumer(topic, subscription, **options) as consumer:
        try:
            for number, message in enumerate(consumer, start=1):
                text = message.data.decode(errors="backslashreplace")
                at, key = message.message_id, message.key or ""
                place = f"{at.ledger_id}:{at.entry_id}" + (f":{at.batch_index}" if at.batch_index >= 0 else "")
                console.print(f"[dim]{place}[/]  {f'[cyan]{escape(key)}[/]  ' if key else ''}", end="")
                console.print(text, markup=False, highlight=False, soft_wrap=True)
                consumer.ack_nowait(message)  # `close` sends pending acknowledgements
                if number == count:
                    break
        except KeyboardInterrupt:
            console.print("stopped", style="dim")
