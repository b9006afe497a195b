"""What became of a commit whose write failed: the truth, or "unknown" where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rocksdict

from cepheid_metadata import Check, Create, Delete, StoreUnavailableError
from cepheid_metadata.rocks_tree import Outcome, RocksTree


class FailingDb:
    """The database, but its next write fails: after the write was logged (the sync failed), or before."""

    def __init__(self, db: rocksdict.Rdict, logged: bool) -> None:
        self._db = db
        self._logged = logged

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def write(self, batch: rocksdict.WriteBatch) -> None:
        if not self._logged:
            raise Exception("IO error: no luck")  # as rocksdict does
        self._db.write(batch)

    def flush_wal(self, sync: bool) -> None:
        raise Exception("IO error: no luck")


class WatchedDb(FailingDb):
    """The database; notes its writes and the syncs of its log."""

    def __init__(self, db: rocksdict.Rdict, calls: list[str]) -> None:
        super().__init__(db, logged=False)
        self._calls = calls

    def write(self, batch: rocksdict.WriteBatch) -> None:
        self._db.write(batch)
        self._calls.append("write")

    def flush_wal(self, sync: bool) -> None:
        self._db.flush_wal(sync)
        self._calls.append("sync" if sync else "flush")


def failing_tree(directory: Path, logged: bool) -> RocksTree:
    tree = RocksTree(directory)
    tree.open()
    tree.commit([[Create("/before", b"")]])
    tree._db = FailingDb(tree._db, logged)  # type: ignore[assignment]
    return tree


def test_every_commit_is_one_synced_write(tmp_path: Path) -> None:
    """SIGKILL cannot show this: what only the page cache holds survives it, but not the loss of power."""
    tree = RocksTree(tmp_path)
    tree.open()
    assert tree._db is not None
    calls: list[str] = []
    tree._db = WatchedDb(tree._db, calls)  # type: ignore[assignment]
    commit = tree.commit([[Create("/a", b"")], [Create("/a", b"")], [Create("/b", b"", ephemeral=True), Delete("/a")]])
    assert commit.outcome is Outcome.APPLIED
    assert calls == ["write", "sync"]
    tree.commit([[Check("/b", 0)]])
    assert calls == ["write", "sync"]  # nothing changed, nothing to sync
    tree.close()


@pytest.mark.parametrize(("logged", "outcome"), [(True, Outcome.APPLIED), (False, Outcome.NOT_APPLIED)])
def test_a_reopened_database_tells_the_outcome(tmp_path: Path, logged: bool, outcome: Outcome) -> None:
    tree = failing_tree(tmp_path, logged)
    assert tree.commit([[Create("/a", b"")]]).outcome is outcome
    assert (tree.get("/a") is not None) is logged
    assert tree.commit([[Create("/b", b"")]]).outcome is Outcome.APPLIED
    tree.close()


@pytest.mark.parametrize("logged", [True, False])
def test_only_what_is_known_to_be_durable_is_served_while_nothing_can_be_written(
    tmp_path: Path, logged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = failing_tree(tmp_path, logged)
    opened = rocksdict.Rdict

    def open_read_only(path: str, options: rocksdict.Options, access_type: Any = None) -> rocksdict.Rdict:
        if access_type is None:
            raise Exception("IO error: No space left on device")
        return opened(path, options, access_type=access_type)

    with monkeypatch.context() as patched:
        # An orderly close would move the log's content to a table; a database that met an error cannot.
        patched.setattr(rocksdict, "Rdict", open_read_only)
        outcome = tree.commit([[Create("/a", b"")]]).outcome
        assert not tree.is_writable
        with pytest.raises(StoreUnavailableError, match="cannot be written now"):
            tree.commit([[Create("/b", b"")]])
        if logged:  # it may be lost with the power: neither its outcome nor its contents may be told
            assert outcome is Outcome.UNKNOWN
            with pytest.raises(StoreUnavailableError, match="cannot be read now"):
                tree.get("/before")
        else:
            assert outcome is Outcome.NOT_APPLIED
            assert tree.get("/before") is not None
        assert not tree.reopen()
    assert tree.reopen()
    assert (tree.get("/a") is not None) is logged
    tree.close()
    tree.close()
