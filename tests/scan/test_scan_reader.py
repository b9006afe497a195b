"""The stream that `scan()` gives: closing it closes what feeds it, whoever reads it, and errors keep their kind."""

from __future__ import annotations

import signal
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.acero as acero
import pyarrow.dataset as ds
import pytest

from cepheid_scan import DataLossError
from cepheid_scan.scan_reader import ScanReader
from cepheid_scan.stop_signal import StopSignal

SCHEMA = pa.schema([("n", pa.int64())])
COUNT = 5


class Feed:
    """Batches of one row each, and whether somebody ended them."""

    def __init__(self, fails: bool = False, before_batch: Callable[[], Any] = lambda: None) -> None:
        self.is_closed = False
        self._fails = fails
        self._before_batch = before_batch
        self.stop = StopSignal()
        self.reader = ScanReader(SCHEMA, self._batches(), self.stop)

    def _batches(self) -> Generator[pa.RecordBatch, None, None]:
        try:
            for number in range(COUNT):
                self._before_batch()
                yield pa.record_batch([[number]], schema=SCHEMA)
                if self._fails:
                    raise DataLossError("trimmed", ledger_id=7)
        finally:
            self.is_closed = True


def test_leaving_the_block_closes_what_feeds_it() -> None:
    feed = Feed()
    with feed.reader as reader:
        assert reader.read_next_batch().num_rows == 1
        assert not feed.is_closed
    assert feed.is_closed
    with pytest.raises(ValueError, match="reader of this scan is closed"):
        reader.read_next_batch()
    reader.close()


def test_whoever_drops_it_closes_it() -> None:
    feed = Feed()
    next(feed.reader)
    del feed.reader
    assert feed.is_closed


def test_a_stream_that_was_given_away_outlives_the_name_and_raises_when_it_is_closed() -> None:
    feed = Feed()
    taken = pa.RecordBatchReader.from_stream(feed.reader)
    taken.read_next_batch()
    feed.reader.close()
    with pytest.raises(Exception, match="reader of this scan is closed"):  # not the end of the stream
        taken.read_next_batch()
    other = Feed()
    taken = pa.RecordBatchReader.from_stream(other.reader)
    del other.reader
    assert taken.read_all()["n"].to_pylist() == list(range(COUNT))


def test_closing_waits_for_another_thread_that_reads_and_gets_an_error() -> None:
    began, may_go_on = threading.Event(), threading.Event()

    def before_batch() -> None:
        began.set()
        assert may_go_on.wait(10)

    feed = Feed(before_batch=before_batch)
    raised: list[Exception] = []

    def read() -> None:
        try:
            feed.reader.read_next_batch()
        except ValueError as error:
            raised.append(error)

    reading = threading.Thread(target=read)
    reading.start()
    assert began.wait(10)
    closing = threading.Thread(target=feed.reader.close)
    closing.start()
    assert not feed.is_closed
    may_go_on.set()
    closing.join(10)
    reading.join(10)
    assert feed.is_closed
    assert "reader of this scan is closed" in str(raised[0])


def test_errors_keep_their_kind() -> None:
    with pytest.raises(DataLossError, match="trimmed"):
        Feed(fails=True).reader.read_all()
    with pytest.raises(DataLossError, match="trimmed"):
        list(Feed(fails=True).reader)


def test_it_is_read_like_a_reader_of_pyarrow() -> None:
    assert Feed().reader.schema == SCHEMA
    assert [batch["n"][0].as_py() for batch in Feed().reader] == list(range(COUNT))
    assert Feed().reader.read_pandas()["n"].tolist() == list(range(COUNT))
    narrow = pa.schema([("n", pa.int32())])
    assert Feed().reader.cast(narrow).read_all().schema == narrow
    assert pa.RecordBatchReader.from_stream(Feed().reader, schema=narrow).read_all().schema == narrow
    assert pa.table(Feed().reader).num_rows == COUNT
    assert pa.Table.from_batches(Feed().reader).num_rows == COUNT
    assert ds.Scanner.from_batches(Feed().reader).to_table().num_rows == COUNT


def test_what_insists_on_the_class_of_pyarrow_gets_one() -> None:
    for insisting in (ds.InMemoryDataset, acero.RecordBatchReaderSourceNodeOptions):
        with pytest.raises(TypeError):
            insisting(Feed().reader)
    assert ds.InMemoryDataset(pa.RecordBatchReader.from_stream(Feed().reader)).count_rows() == COUNT
    source = acero.RecordBatchReaderSourceNodeOptions(pa.RecordBatchReader.from_stream(Feed().reader))
    assert acero.Declaration("record_batch_reader_source", source).to_table().num_rows == COUNT
    with pytest.raises(pa.ArrowInvalid, match="trimmed"):  # a stream tells what went wrong, not its kind
        pa.RecordBatchReader.from_stream(Feed(fails=True).reader).read_all()


def test_a_dataset_is_written_from_it(tmp_path: Path) -> None:
    ds.write_dataset(Feed().reader, tmp_path, format="parquet")
    assert ds.dataset(tmp_path).count_rows() == COUNT


def test_duckdb_and_polars_take_it() -> None:
    duckdb, polars = pytest.importorskip("duckdb"), pytest.importorskip("polars")
    history = Feed().reader
    assert duckdb.sql("select sum(n) from history").fetchall() == [(sum(range(COUNT)),)]
    assert duckdb.from_arrow(Feed().reader).fetchall() == [(number,) for number in range(COUNT)]
    left = Feed()
    relation = duckdb.from_arrow(left.reader)
    left.reader.close()
    with pytest.raises(Exception, match="reader of this scan is closed"):
        relation.fetchall()
    assert polars.from_arrow(Feed().reader)["n"].to_list() == list(range(COUNT))
    assert polars.DataFrame(Feed().reader)["n"].to_list() == list(range(COUNT))
    del history


@pytest.fixture
def closing_on_signal() -> Iterator[Callable[[Feed], None]]:
    """Makes SIGUSR1 close a feed's reader, as programs do that clean up when they are told to end."""
    before = signal.getsignal(signal.SIGUSR1)

    def close_at(feed: Feed) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: feed.reader.close())

    yield close_at
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_handler_may_close_what_its_own_thread_reads(closing_on_signal: Callable[[Feed], None]) -> None:
    began: list[str] = []
    feed = Feed(before_batch=lambda: began.append("batch") or signal.raise_signal(signal.SIGUSR1))
    closing_on_signal(feed)
    with pytest.raises(ValueError, match="reader of this scan is closed"):
        feed.reader.read_all()
    assert began == ["batch"], "nothing is read for a reader that is closed"
    assert feed.is_closed
    with pytest.raises(ValueError, match="reader of this scan is closed"):
        feed.reader.read_next_batch()


def test_a_signal_handler_ends_what_its_own_thread_waits_for(closing_on_signal: Callable[[Feed], None]) -> None:
    feed = Feed(before_batch=lambda: feed.stop.pause(60))
    closing_on_signal(feed)
    threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1)).start()
    began = time.monotonic()
    with pytest.raises(ValueError, match="reader of this scan is closed"):
        feed.reader.read_next_batch()
    assert time.monotonic() - began < 30
    assert feed.is_closed


def test_an_error_comes_again_whenever_the_rest_is_asked_for() -> None:
    """As by a cell of a notebook that is run again: an empty rest would look like the end."""
    reader = Feed(fails=True).reader
    reader.read_next_batch()
    depths = []
    for read in (reader.read_next_batch, reader.read_all, lambda: list(reader), lambda: pa.table(reader), reader.read_next_batch):
        with pytest.raises(Exception, match="trimmed") as raised:
            read()
        depths.append(len(raised.traceback))
    assert depths[-1] <= depths[0], "its traceback does not grow"
    with pytest.raises(DataLossError) as last:
        reader.read_next_batch()
    assert last.value.facts == {"ledger_id": 7}
    assert last.value.__context__ is None


def test_an_error_that_is_kept_holds_nothing_of_whoever_reads() -> None:
    class Large:
        pass

    def read() -> weakref.ref[Large]:
        large = Large()
        with pytest.raises(DataLossError):
            reader.read_all()
        return weakref.ref(large)

    reader = Feed(fails=True).reader
    left = read()
    assert left() is None


def test_an_interrupted_stream_does_not_look_ended() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    reader = Feed(before_batch=interrupt).reader
    with pytest.raises(KeyboardInterrupt):
        reader.read_all()
    with pytest.raises(ValueError, match="reading of this scan was interrupted"):
        reader.read_all()


def test_duckdb_gets_the_error_again() -> None:
    duckdb = pytest.importorskip("duckdb")
    reader = Feed(fails=True).reader
    for _ in range(2):
        with pytest.raises(Exception, match="trimmed"):
            duckdb.from_arrow(reader).fetchall()
