"""What the metadata store held at every commit, for reads that show the past."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

from cepheid_metadata.tree import Node


class TreePast:
    """Commits are numbered from 1. Known are keys that were written; parents that came into being with them are not."""

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._nodes: dict[str, tuple[list[int], list[Node | None]]] = {}  # key → (commits, the node since each)

    def __repr__(self) -> str:
        return f"<TreePast of {self.commits} commits, {len(self._nodes)} keys>"

    def __contains__(self, key: str) -> bool:
        return key in self._nodes

    @property
    def commits(self) -> int:
        return len(self._times_s)

    def note(self, keys: Sequence[str], node_of: Callable[[str], Node | None], now_s: float) -> None:
        """These keys were written just now."""
        self._times_s.append(now_s)
        for key in keys:
            commits, nodes = self._nodes.setdefault(key, ([], []))
            commits.append(self.commits)
            nodes.append(node_of(key))

    def commits_before(self, when_s: float) -> int:
        return bisect.bisect_right(self._times_s, when_s)

    def node_at(self, key: str, commit: int) -> Node | None:
        commits, nodes = self._nodes.get(key, ([], []))
        place = bisect.bisect_right(commits, commit)
        return nodes[place - 1] if place else None
