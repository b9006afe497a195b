"""The result of `scan()`: an Arrow stream that ends its threads and its reads of bookies when it is closed.

    batches of the tasks ──► ClosableBatches ──► pyarrow.RecordBatchReader ──┬─ read_next_batch, read_all, …
         ▲                         ▲                                         └─ __arrow_c_stream__ ──► DuckDB, Polars, pyarrow
         └─ StopSignal ◄───────────┴── ScanReader.close

pyarrow's reader accepts any generator, but its `close` does nothing for one, and it can be neither changed nor subclassed with a
stream in it. So this class contains one. To get pyarrow's own class, use `pyarrow.RecordBatchReader.from_stream(reader)`,
whose errors have our texts, but pyarrow's types.

Rule 1: a stream that was closed or has failed raises whenever it is read, also in a library that took it earlier: missing
rows must not look as if there were none.
Rule 2: dropping the last reference to the stream closes it.
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
"""Base class only for `polars.from_arrow`, which treats objects with a class of pyarrow among their bases as rows, and any other
stream as a column of structs. A public one would not do: a subclass of `pyarrow.RecordBatchReader` cannot be constructed.
"""

_ASK_ANEW = "start a new scan() for the rows that are left"


class ScanReader(_OfPyarrow):  # type: ignore[misc]
    """Record batches of a scan, readable once, like a `pyarrow.RecordBatchReader`: iterate over it, `read_all()`, or pass it to
    libraries that accept Arrow streams. Close it, or use it in a `with`, if it is not read to its end. All waits in `batches` heed
    `stop`.
    """

    def __init__(self, schema: pa.Schema, batches: Generator[pa.RecordBatch, None, None], stop: StopSignal) -> None:
        self._batches = ClosableBatches(batches, stop)
        self._reader = pa.RecordBatchReader.from_batches(schema, self._batches)

    @property
    def schema(self) -> pa.Schema:
        return self._reader.schema

    def __iter__(self) -> Self:
        return self

    def read_next_batch(self) -> pa.RecordBatch:
        """Return the next batch. Raises StopIteration at the end; ScanError, repeatedly; and ValueError if the reader is closed."""
        return self._reader.read_next_batch()

    __next__ = read_next_batch

    def read_all(self) -> pa.Table:
        """Return all batches that were not read yet."""
        return self._reader.read_all()

    def read_pandas(self, **options: Any) -> Any:
        """Return the rest as a pandas DataFrame; `options` are those of `pyarrow.Table.to_pandas`."""
        return self.read_all().to_pandas(**options)

    def cast(self, target_schema: pa.Schema) -> pa.RecordBatchReader:
        """Return the same stream with other types."""
        return self._reader.cast(target_schema)

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self._reader.__arrow_c_stream__(requested_schema)

    def close(self) -> None:
        """Return when its threads have ended: those that wait for bookies at once, those that decode after their batch.

        In a signal handler that interrupts the reading of this stream it returns earlier; the reading then raises.
        """
        self._batches.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class ClosableBatches:
    """A generator that may be closed while it runs, by another thread or by a signal handler that interrupts it."""

    def __init__(self, batches: Generator[Any, None, None], stop: StopSignal) -> None:
        self._batches = batches
        self._stop = stop
        self._closed = False
        self._error: Exception | None = None  # the error with which it ended
        self._in_turn = threading.RLock()  # a running generator can be neither advanced nor closed; reentrant for signal handlers

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
        """Keep the error: a generator that failed would otherwise only appear to be exhausted."""
        try:
            return next(self._batches)
        except (StopIteration, StoppedError):
            raise
        except Exception as error:
            self._error = _bare(error)
            raise
        except BaseException:  # Ctrl-C, which is raised once
            self._error = ValueError(f"the reading of this scan was interrupted: {_ASK_ANEW}")
            raise

    def close(self) -> None:
        """Return when it is closed; in a signal handler that interrupts `__next__` return earlier, and `__next__` closes it."""
        self._closed = True
        if not self._in_turn.acquire(blocking=False):
            self._stop.set()  # the thread inside may be waiting for bookies
            self._in_turn.acquire()
        try:
            if getgeneratorstate(self._batches) == GEN_RUNNING:
                # This thread may hold any of the locks that stopping takes.
                threading.Thread(target=self._stop.set, name="cepheid-stop-scan", daemon=True).start()
            else:
                self._batches.close()
        finally:
            self._in_turn.release()


def _bare(error: Exception) -> Exception:
    """Return the error without its traceback, which would keep the reader's frames, and grow each time it is raised."""
    kind = type(error)
    bare = kind.__new__(kind, *error.args)  # not through the constructor: some errors take other arguments than they keep
    bare.__dict__.update(error.__dict__)
    return bare
