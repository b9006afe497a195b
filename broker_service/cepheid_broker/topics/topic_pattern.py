"""Regular expressions of clients over topic names (linear_pattern.py: they cannot stall the broker)."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

from cepheid_broker.linear_pattern import compile_pattern
from cepheid_wire import TopicName

_SCHEME = re.compile(r"(\^?)(?:non-)?persistent://")


class TopicPattern:
    def __init__(self, pattern: str) -> None:
        """Compile the pattern. Raises NotAllowedError."""
        self.text = pattern
        # Patterns are matched without the scheme, which clients may include (PulsarApi.proto, topics_pattern; protocol.md §21).
        self._without_scheme = _SCHEME.sub(r"\1", pattern, count=1) if _SCHEME.match(pattern) else pattern
        assert self._compiled is not None

    def __repr__(self) -> str:
        return f"<TopicPattern {self.text!r}>"

    def matches(self, topic: TopicName) -> bool:
        """Return whether the topic's name matches; a partition is matched by its topic's name, to which clients subscribe."""
        return self._compiled.fullmatch(str(topic.base).partition("://")[2]) is not None

    @cached_property
    def _compiled(self) -> Any:
        return compile_pattern(self._without_scheme, "topics")
