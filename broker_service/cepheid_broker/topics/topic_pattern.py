"""Regular expressions of clients over names of topics, which cannot stall the broker.

Python's `re` backtracks: one hostile pattern, `(a+)+$`, would hold the loop for minutes, also from a thread, since it keeps the
interpreter's lock, and nothing stops it. RE2 matches in time linear in the name, in bounded memory; newer Pulsar brokers use it for
the same reason (RE2/J). Its price: no lookaround and no back-references, which are refused by name.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

from cepheid_broker.errors import NotAllowedError
from cepheid_wire import TopicName

MAX_PATTERN_CHARS = 2000
MAX_COMPILED_BYTES = 1 << 20

_SCHEME = re.compile(r"(\^?)(?:non-)?persistent://")


class TopicPattern:
    def __init__(self, pattern: str) -> None:
        """Raises NotAllowedError."""
        if len(pattern) > MAX_PATTERN_CHARS:
            raise NotAllowedError(f"a pattern of topics has {len(pattern)} characters; {MAX_PATTERN_CHARS} are possible")
        self.text = pattern
        # Patterns are matched without the scheme, and clients may write one (PulsarApi.proto, topics_pattern; protocol.md §21).
        self._without_scheme = _SCHEME.sub(r"\1", pattern, count=1) if _SCHEME.match(pattern) else pattern
        assert self._compiled is not None

    def __repr__(self) -> str:
        return f"<TopicPattern {self.text!r}>"

    def matches(self, topic: TopicName) -> bool:
        """A partition is matched by the name of its topic: clients subscribe to that."""
        return self._compiled.fullmatch(str(topic.base).partition("://")[2]) is not None

    @cached_property
    def _compiled(self) -> Any:
        import re2  # not needed by most brokers

        options = re2.Options()
        options.max_mem = MAX_COMPILED_BYTES
        options.log_errors = False
        try:
            return re2.compile(self._without_scheme, options)
        except re2.error as error:
            why = error.args[0].decode(errors="replace") if error.args and isinstance(error.args[0], bytes) else str(error)
            raise NotAllowedError(f"{self.text[:200]!a} is no pattern of topics: {why} (RE2 syntax)") from None
