"""What an object store may answer on a bad day, and what we say then: that it is certain, that it may pass, and what to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cepheid_ports import ThreadWorker
from cepheid_tiered import NoSuchSegmentError, SegmentError
from cepheid_tiered.object_store import StoreRefusedError, StoreUnavailableError
from cepheid_tiered.object_stores import ObjectStores
from cepheid_tiered.remote_objects import StoreTimeouts
from tests.tiered.s3_server import credentials

SECRET = "secret-of-a-test"
QUICK = StoreTimeouts(connect_s=1, request_s=5, retries=0, retry_s=1)


@asynccontextmanager
async def answering(status: int, code: str) -> AsyncIterator[str]:
    """A server that gives every request this answer, as S3 words it. The URL of an object there."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>words of {code}</Message></Error>".encode() if code else b""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        sent = b"" if head.startswith(b"HEAD") else body
        length = b"Content-Length: %d\r\nContent-Type: application/xml\r\nConnection: close\r\n\r\n" % len(body)
        writer.write(b"HTTP/1.1 %d Answer\r\n" % status + length + sent)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"s3://segments/a?endpoint=http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def one_part() -> AsyncIterator[bytes]:
    yield b"x"


@pytest.mark.parametrize(
    ("status", "code", "kind", "words"),
    [
        (404, "NoSuchKey", NoSuchSegmentError, "does not exist"),
        (404, "NoSuchBucket", StoreRefusedError, "there is no bucket segments"),
        (404, "", StoreRefusedError, "check bucket and endpoint"),
        (403, "AccessDenied", StoreRefusedError, "no permission.*check the credentials"),
        (403, "InvalidAccessKeyId", StoreRefusedError, "no permission.*check the credentials"),
        (403, "RequestTimeTooSkewed", StoreRefusedError, "the clock of this machine"),
        (400, "ExpiredToken", StoreRefusedError, "the credentials have expired"),
        (400, "AuthorizationHeaderMalformed", StoreRefusedError, "is in another region.*region="),
        (301, "PermanentRedirect", StoreRefusedError, "is in another region.*region="),
        (500, "InternalError", StoreUnavailableError, "could not be reached"),
        (503, "SlowDown", StoreUnavailableError, "could not be reached"),
    ],
)
async def test_answers_of_a_store(status: int, code: str, kind: type[SegmentError], words: str) -> None:
    worker = ThreadWorker("files")
    with credentials():
        async with answering(status, code) as url:
            store = ObjectStores(worker, QUICK)
            requests = [store.get_range(url, 0, 1)]
            if kind is not NoSuchSegmentError:  # which is no answer to a write
                requests += [store.put(url, b"x"), store.upload(url, one_part()), store.delete(url)]  # type: ignore[list-item]
            for request in requests:
                with pytest.raises(kind, match=words) as caught:
                    await request
                assert url in str(caught.value)
                assert SECRET not in str(caught.value)
                assert caught.value.retriable is (kind is not NoSuchSegmentError)
    await worker.aclose()
