"""What the metadata store held at every commit, for reads and listings that show the past."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable

from cepheid_metadata.tree import ROOT, Node, parent_of


class TreePast:
    """Commits are numbered from 1. Known are all nodes since they came into being, parents that came with them too."""

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._nodes: dict[str, tuple[list[int], list[Node | None]]] = {}  # key → (commits, the node since each)
        self._names: dict[str, dict[str, None]] = {}  # key → the children that it ever had

    def __repr__(self) -> str:
        return f"<TreePast of {self.commits} commits, {len(self._nodes)} keys>"

    @property
    def commits(self) -> int:
        return len(self._times_s)

    def note(self, keys: Iterable[str], node_of: Callable[[str], Node | None], now_s: float) -> None:
        """These keys were written just now, came into being or went away."""
        self._times_s.append(now_s)
        for key in keys:
            if key not in self._nodes:
                parent_key = parent_of(key)
                self._names.setdefault(parent_key, {})[key[len(parent_key) :].lstrip("/")] = None
            commits, nodes = self._nodes.setdefault(key, ([], []))
            commits.append(self.commits)
            nodes.append(node_of(key))

    def commits_before(self, when_s: float) -> int:
        return bisect.bisect_right(self._times_s, when_s)

    def node_at(self, key: str, commit: int) -> Node | None:
        commits, nodes = self._nodes.get(key, ([], []))
        place = bisect.bisect_right(commits, commit)
        return nodes[place - 1] if place else None

    def names_at(self, key: str, commit: int) -> list[str] | None:
        """The children that it had, sorted; None: it was not there."""
        if key != ROOT and self.node_at(key, commit) is None:
            return None
        parent = key.rstrip("/")
        return sorted(name for name in self._names.get(key, ()) if self.node_at(f"{parent}/{name}", commit) is not None)
