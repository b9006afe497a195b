"""`cepheid produce` and `cepheid consume`."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape

from cepheid_cli.wire_client import WireClient
from cepheid_wire import TopicName


def produce_messages(url: str, topic: str, messages: list[str] | None, key: str) -> None:
    console = Console()
    with WireClient(url, str(TopicName.parse(topic))) as client:
        client.open_producer()
        for sequence_id, message in enumerate(messages if messages is not None else map(str.rstrip, sys.stdin)):
            ledger_id, entry_id = client.send(sequence_id, message.encode(), key=key)
            console.print(f"{ledger_id}:{entry_id}", highlight=False)


def consume_messages(url: str, topic: str, subscription: str, *, count: int, shared: bool, earliest: bool) -> None:
    console = Console()
    with WireClient(url, str(TopicName.parse(topic)), timeout_s=3600.0) as client:
        client.subscribe(subscription, shared=shared, earliest=earliest)
        try:
            for number, message in enumerate(client.receive(), start=1):
                place = f"{message.ledger_id}:{message.entry_id}" + (f":{message.batch_index}" if message.batch_index >= 0 else "")
                text = message.payload.decode(errors="backslashreplace")
                console.print(f"[dim]{place}[/]  {f'[cyan]{escape(message.key)}[/]  ' if message.key else ''}", end="")
                console.print(text, markup=False, highlight=False, soft_wrap=True)
                client.acknowledge(message)
                if number == count:
                    break
        except KeyboardInterrupt:
            console.print("stopped", style="dim")
        client.close_consumer()
