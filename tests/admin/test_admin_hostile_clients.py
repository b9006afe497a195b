"""What clients of the binary protocol choose freely (names, versions, metadata, times), as the API shows it."""

from __future__ import annotations

from urllib.parse import quote, urlsplit

import pytest
from google.protobuf.message import Message

from cepheid_wire import encode_body, encode_tail
from cepheid_wire import pulsar_api_pb2 as pb
from tests.admin.admin_world import NAMESPACE, AdminWorld
from tests.broker.scripted_client import ScriptedClient, send_frame

pytestmark = pytest.mark.slow

FULL = "persistent://public/default"
MARK = "QQQQ"
TEXTS = [b"\xff\xfe\xfd\xfc", b"\xed\xa0\x80\xff", b"\x00\x01\r\n", "✓x".encode(), b'"}],']
SHOWN = (
    "stats",
    "stats?getPreciseBacklog=true&getEarliestTimeInBacklog=true",
    "internalStats",
    "internal-info",
    "subscriptions",
    "examinemessage",
    "lastMessageId",
    "messageid/0",
    "properties",
)
FAR_FUTURE_MS = (1 << 63) - 1
CHECKSUM_BYTES = 6  # magic and CRC


def with_text(data: bytes, text: bytes) -> bytes:
    """`text` where its strings say MARK: no library would encode that."""
    assert len(text) == len(MARK)
    return data.replace(MARK.encode(), text)


class HostileClient:
    """Says `text` wherever it may say something. What is refused is refused: the API answers all the same."""

    def __init__(self, client: ScriptedClient, text: bytes) -> None:
        self._client = client
        self._text = text

    async def ask(self, body: Message) -> None:
        self._client.send_bytes(with_text(bytes(encode_body(body)), self._text))
        await self._client.receive()

    async def publish(self, topic: str) -> None:
        await self._client.produce_on(topic, producer_id=9)
        label = pb.KeyValue(key=MARK, value=MARK)
        metadata = pb.MessageMetadata(producer_name=MARK, sequence_id=0, partition_key=MARK, properties=[label], uuid=MARK)
        metadata.publish_time = metadata.event_time = FAR_FUTURE_MS
        tail = with_text(encode_tail(metadata, b"payload")[CHECKSUM_BYTES:], self._text)  # without checksum it is as good
        self._client.send_bytes(send_frame(pb.CommandSend(producer_id=9, sequence_id=0), tail))
        await self._client.receive()

    async def connect_everything(self, topic: str) -> None:
        label = pb.KeyValue(key=MARK, value=MARK)
        await self.ask(pb.CommandProducer(topic=topic, producer_id=1, request_id=1, producer_name=MARK, metadata=[label]))
        for kind in (pb.CommandSubscribe.Shared, pb.CommandSubscribe.Key_Shared):
            consumer = pb.CommandSubscribe(
                topic=topic, subscription=f"{kind}{MARK}", subType=kind, consumer_id=kind, request_id=2 + kind, consumer_name=MARK
            )
            consumer.metadata.append(label)
            consumer.subscription_properties.append(label)
            await self.ask(consumer)


@pytest.mark.parametrize("text", TEXTS, ids=repr)
def test_whatever_a_client_calls_itself_the_api_answers(admin: AdminWorld, text: bytes) -> None:
    topic = f"hostile-{TEXTS.index(text)}"
    admin.put(f"{NAMESPACE}/{topic}/subscription/s", json={"ledgerId": -1, "entryId": -1})
    port = int(urlsplit(admin.standalone.service_url).port or 0)

    async def look() -> None:
        for path in (*(f"{NAMESPACE}/{topic}/{call}" for call in SHOWN), "/metrics", f"/cepheid/v1/plan?topic={FULL}/{topic}"):
            answer = await admin.send("GET", path)
            assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
        for name in (await admin.send("GET", f"{NAMESPACE}/{topic}/subscriptions")).json():
            path = f"{NAMESPACE}/{topic}/subscription/{quote(quote(name, safe=''), safe='')}"
            assert (await admin.send("GET", f"{path}/properties")).status_code == 200

    async def main() -> None:
        async with await ScriptedClient.open(port, handshake=False) as client:
            await HostileClient(client, text).ask(pb.CommandConnect(client_version=MARK, protocol_version=20))
            async with await ScriptedClient.open(port) as other:
                await HostileClient(other, text).publish(topic)
            for each in (client, await ScriptedClient.open(port)):
                try:
                    await HostileClient(each, text).connect_everything(f"{FULL}/{topic}")
                    await look()
                finally:
                    await each.close()

    admin.run(main())
