"""Errors in a user's options or cluster without our stack: Spark shows a Python traceback as the message of its error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from cepheid_ports import CepheidError

P = ParamSpec("P")
R = TypeVar("R")


def brief_errors(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate methods that Spark calls. A CepheidError is complete without its stack; other exceptions keep theirs."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except CepheidError as error:
            raise error.with_traceback(None) from None

    return call
