"""What `scan()` gives: an Arrow stream that ends its threads, and leaves the bookies, when it is closed.

    batches of the tasks ──► ClosableBatches ──► pyarrow.RecordBatchReader ──┬─ read_next_batch, read_all, …
         ▲                         ▲                                         └─ __arrow_c_stream__ ──► DuckDB, Polars, pyarrow
         └─ StopSignal ◄───────────┴── ScanReader.close

pyarrow's reader takes any generator, but its `close` does nothing for one, and it can be neither changed nor subclassed with a
stream in it. So it stands within. Whoever must have one of pyarrow's makes it: `pyarrow.RecordBatchReader.from_stream(reader)`,
whose errors have the texts of ours, and kinds of pyarrow's.

Rule 1: a stream that was closed, or has failed, raises whenever it is read, also in a library that took it before: rows that are
missing must not look as if there were none.
Rule 2: whoever drops the last hold on the stream closes it.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from inspect import GEN_RUNNING, getgeneratorstate
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from cepheid_scan.stop_signal import StoppedError, StopSignal

_OfPyarrow: Any = getattr(pa.lib, "_ReadPandasMixin", object)
"""For `polars.from_arrow` alone, which takes what has a class of pyarrow among its own as rows, and any other stream as a column of
structs. A public one would not do: `pyarrow.RecordBatchReader` cannot be constructed by a class under it."""

_ASK_ANEW = "what it has not given yet must be asked for by a new scan()"


class ScanReader(_OfPyarrow):  # type: ignore[misc]
    """Record batches of a scan, once, like a `pyarrow.RecordBatchReader`: iterate it, `read_all()`, or give it to what takes
    Arrow streams. Close it, or use it in a `with`, where it is not read to its end. What `batches` wait for heeds `stop`."""

    def __init__(self, schema: pa.Schema, batches: Generator[pa.RecordBatch, None, None], stop: StopSignal) -> None:
        self._batches = ClosableBatches(batches, stop)
        self._reader = pa.RecordBatchReader.from_batches(schema, self._batches)

    @property
    def schema(self) -> pa.Schema:
        return self._reader.schema

    def __iter__(self) -> Self:
        return self

    def read_next_batch(self) -> pa.RecordBatch:
        """Raises StopIteration at the end; ScanError, the same one from then on; and ValueError when it is closed."""
        return self._reader.read_next_batch()

    __next__ = read_next_batch

    def read_all(self) -> pa.Table:
        """All batches that were not read yet."""
        return self._reader.read_all()

    def read_pandas(self, **options: Any) -> Any:
        """As a pandas DataFrame; `options` are those of `pyarrow.Table.to_pandas`."""
        return self.read_all().to_pandas(**options)

    def cast(self, target_schema: pa.Schema) -> pa.RecordBatchReader:
        """The same stream in these types."""
        return self._reader.cast(target_schema)

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self._reader.__arrow_c_stream__(requested_schema)

    def close(self) -> None:
        """Returns when its threads have ended: those that wait for bookies at once, those that decode after their batch.

        In a signal handler that interrupts the reading of this very stream it returns before; that raises when it goes on."""
        self._batches.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class ClosableBatches:
    """A generator that may be closed while it runs: by another thread, and by a signal handler in the midst of its own."""

    def __init__(self, batches: Generator[Any, None, None], stop: StopSignal) -> None:
        self._batches = batches
        self._stop = stop
        self._closed = False
        self._error: Exception | None = None  # with which it ended
        self._in_turn = threading.RLock()  # a generator that runs can be neither asked nor closed; reentrant for signal handlers

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        with self._in_turn:
            if self._error is not None:
                raise _bare(self._error)
            batch = None
            try:
                if not self._closed:
                    batch = self._ask()
            except (StopIteration, StoppedError):
                if not self._closed:
                    raise
            if self._closed:  # perhaps meanwhile
                self._batches.close()
                raise ValueError(f"the reader of this scan is closed: {_ASK_ANEW}")
            return batch

    def _ask(self) -> Any:
        """Keeps the error: a generator that failed would only say that it is over."""
        try:
            return next(self._batches)
        except (StopIteration, StoppedError):
            raise
        except Exception as error:
            self._error = _bare(error)
            raise
        except BaseException:  # Ctrl-C, which is said once
            self._error = ValueError(f"the reading of this scan was interrupted: {_ASK_ANEW}")
            raise

    def close(self) -> None:
        """Returns when it is closed; in a signal handler in the midst of `__next__` before, which closes it when it goes on."""
        self._closed = True
        if not self._in_turn.acquire(blocking=False):
            self._stop.set()  # the thread that is within may wait for bookies
            self._in_turn.acquire()
        try:
            if getgeneratorstate(self._batches) == GEN_RUNNING:
                # Of the locks that stopping takes this thread may hold any.
                threading.Thread(target=self._stop.set, name="cepheid-stop-scan", daemon=True).start()
            else:
                self._batches.close()
        finally:
            self._in_turn.release()


def _bare(error: Exception) -> Exception:
    """The same without its traceback, which would hold the frames of whoever reads, and grow each time it is raised."""
    kind = type(error)
    bare = kind.__new__(kind, *error.args)  # not by a call: kinds of errors take other arguments than they keep
    bare.__dict__.update(error.__dict__)
    return bare
