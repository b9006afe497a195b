"""Request bodies, read as JSON whatever their content type: clients send `application/json`, a vendor type, or none
(docs/reference/behaviours.md §3).

The types of web forms are refused before (cross_site.py).
"""

from __future__ import annotations

from typing import Any

from fastapi import Depends, Request
from pydantic import TypeAdapter, ValidationError

from cepheid_broker.admin.errors import BadRequestError, BodyTooLargeError

MAX_BODY_BYTES = 1 << 20  # Pulsar's default is no limit; apart from schemas, the largest body is the policies of a namespace

_ADAPTER = "reads_body_as"


def json_body(kind: Any, *, max_bytes: int = MAX_BODY_BYTES) -> Any:
    """Return a dependency that reads the body as `kind`. An empty body reads as null, so `T | None` makes it optional."""
    adapter: TypeAdapter[Any] = TypeAdapter(kind)

    async def read(request: Request) -> Any:
        body = request.state.body = await _read_bounded(request, max_bytes)  # kept for the same call to another broker
        try:
            return adapter.validate_json(body or b"null")
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(("body", *map(str, first["loc"])))
            raise BadRequestError(f"{where}: {first['msg']}{'' if body else ' (the body is empty)'}") from None

    setattr(read, _ADAPTER, adapter)
    return Depends(read)


def adapter_of(call: Any) -> TypeAdapter[Any] | None:
    """Return how a dependency reads the body, for the API's description; None if it is not one of `json_body`."""
    return getattr(call, _ADAPTER, None)


async def _read_bounded(request: Request, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size_bytes = 0
    async for part in request.stream():
        size_bytes += len(part)
        if size_bytes > max_bytes:
            raise BodyTooLargeError(f"the body has more than {max_bytes} bytes", limit_bytes=max_bytes)
        parts.append(part)
    return b"".join(parts)
