"""Committed chains as a whole: a record together with the pages that it names (M7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cepheid_metadata import Chain, Create, Delete, Op, Put, keys
from cepheid_metadata.chain_pages import assemble, page_keys, pages_of
from tests.simulation.checks.history import History


class CommittedPages:
    """The pages of all chains, after each commit."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._pages: dict[str, dict[str, bytes]] = {}  # by key of the chain and of the page

    def on_commit(self, ops: Sequence[Op]) -> None:
        for op in ops:
            chain_key = chain_of_page(op.key)
            if chain_key is not None and isinstance(op, Create | Put):
                self._pages.setdefault(chain_key, {})[op.key] = op.value
            elif chain_key is not None and isinstance(op, Delete):
                self._pages.setdefault(chain_key, {}).pop(op.key, None)

    def whole(self, key: str, value: bytes, process: str) -> Chain:
        """Return the chain whose record was committed. Call `on_commit` with all of the write first."""
        record = Chain.decode(value, key)
        there = self._pages.get(key, {})
        named = page_keys(record, key)
        if named or there:
            self._history.check(
                "M7", sorted(named) == sorted(there), lambda: f"{process} names pages {named} of {key}, and there are {list(there)}"
            )
        chain = whole_chain(key, value, there.get)
        self._history.check("M7", chain is not None, lambda: f"{process} names pages of {key} that do not fit it: {record.pages}")
        assert chain is not None
        return chain


def chain_of_page(key: str) -> str | None:
    """The key of the chain that a page belongs to; None: this is not the key of a page."""
    parent = key.rpartition("/")[0]
    return parent if keys.is_chain_key(parent) else None


def whole_chain(key: str, value: bytes, page: Callable[[str], bytes | None]) -> Chain | None:
    """Return the chain of a record; None: these are not its pages."""
    record = Chain.decode(value, key)
    pages = pages_of(record, key, [page(page_key) for page_key in page_keys(record, key)])
    return None if pages is None else assemble(record, pages, key).chain
