"""Routing on the path as it was sent, so that a topic name may contain any character.

    /admin/v2/persistent/t/ns/a%2Fpartitions ──route──► topic "a%2Fpartitions" ──decode──► a/partitions, one name

A server that decodes the path first cannot distinguish `a%2Fb` (one segment) from `a/b` (two), and would take the name above for a
call on the partitions of `a`. The middleware gives the router the escaped path; single segments are decoded afterwards
(docs/reference/behaviours.md §3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote, unquote_plus

from cepheid_broker.admin.errors import PreconditionError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class RawPathMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["raw_path"].decode("ascii", errors="replace").partition("?")[0]
            # Some tools add a slash, which means the same. HEAD is GET without its body, which the server omits.
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            scope = {**scope, "method": method, "path": path.rstrip("/") or "/"}
        await self._app(scope, receive, send)


def decode_once(segment: str) -> str:
    """Decode a topic part of a path: form style, `+` is a space."""
    try:
        return unquote_plus(segment, errors="strict")
    except UnicodeDecodeError:
        raise _not_utf8(segment) from None


def decode_twice(segment: str) -> str:
    """Decode a subscription: clients that must escape its slash encode it twice, others once."""
    try:
        return unquote_plus(unquote(segment, errors="strict"), errors="strict")
    except UnicodeDecodeError:
        raise _not_utf8(segment) from None


def _not_utf8(segment: str) -> PreconditionError:
    # Replacing what is not UTF-8 would map several names to one.
    return PreconditionError(f"{segment[:200]!r} in the path is not percent-encoded UTF-8")
