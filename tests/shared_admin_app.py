"""One admin application for all servers of a test process: building its 350 routes takes 0.2 s of a processor, eighty times.

The routes work on the context of the server that a request came to. Each server still has its own port, connections, guard
against other sites and authentication.
"""

from __future__ import annotations

from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from cepheid_broker.admin import app
from cepheid_broker.admin.context import AdminContext

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_serving: ContextVar[AdminContext] = ContextVar("serving")
_create_app = app.create_app


class _ServingContext:
    """Stands for the context of the server that is answering."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_serving.get(), name)


class _BoundApp:
    def __init__(self, shared: ASGIApp, context: AdminContext) -> None:
        self._app = shared
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        token = _serving.set(self._context)
        try:
            await self._app(scope, receive, send)
        finally:
            _serving.reset(token)


@cache
def _shared_app(_routers: object) -> ASGIApp:
    return _create_app(cast(AdminContext, _ServingContext()))


def share() -> None:
    app.create_app = lambda context: _BoundApp(_shared_app(app.ROUTERS), context)
