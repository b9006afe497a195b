"""`cepheid read`: prints a range of a topic's history, read directly from the bookies, as lines or a file.

It creates no subscription and acknowledges nothing, so the messages can be read repeatedly.
"""

from __future__ import annotations

import difflib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from cepheid_ports import CepheidError

if TYPE_CHECKING:
    from cepheid_scan import ScanCounters
    from cepheid_scan.scan_reader import ScanReader

DEFAULT_SERVICE_URL = "pulsar://127.0.0.1:6650"
TABLE_COLUMNS = ("message_id", "publish_time", "key", "value")
ENTRY_TABLE_COLUMNS = ("ledger_id", "entry_id", "publish_time", "producer_name", "sequence_id", "num_messages")
CONDITIONS = ("key", "event_from", "event_until")
BROKEN_PIPE_EXIT = 141  # like a program that SIGPIPE ended
OWN_WORDS = {
    "; failOnMissingTopic=false reads what there is": "",  # one topic is read
    "failOnDataLoss=false": "--accept-loss",
    "onBadRecord=": "--on-bad-record ",
    "on_bad_record '": "--on-bad-record '",
    "with readMode=messages": "without --typed",
    "give {topic: position}": "choose one by --partition",
    "service.url": "--url",
    "admin.url": "--admin-url",
    "no decryption keys are given": "no --decryption-keys are given",
}
"""Advice in errors of a scan, in the terms of Spark or `scan()`, with its replacement here."""

_NEEDED = {"pyarrow": "pyarrow", "numpy": "numpy", "grpc": "grpcio"}


class ReadCommandError(CepheidError):
    """The command cannot do what was requested."""


class Format(StrEnum):
    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"
    TABLE = "table"


def read(
    topic: Annotated[str, typer.Argument(help="Topic, short or full; a partitioned one with all its partitions.")],
    start: Annotated[
        str,
        typer.Option(
            "--from", help="First message: earliest, a time (2026-03-01T08:00:00Z, -6h), a position (12:345), subscription:NAME."
        ),
    ] = "earliest",
    end: Annotated[str, typer.Option("--to", help="End, not included: latest, or a value like --from.")] = "latest",
    where: Annotated[
        list[str] | None,
        typer.Option(help="Only messages with key=KEY (several: any of them), event_from=TIME, event_until=TIME. Repeat it."),
    ] = None,
    partition: Annotated[list[int] | None, typer.Option(help="Only this partition. Repeat it for several.")] = None,
    columns: Annotated[str | None, typer.Option(help="Columns, separated by commas, in this order.")] = None,
    limit: Annotated[int | None, typer.Option(min=0, help="Maximum number of rows.")] = None,
    typed: Annotated[
        bool, typer.Option("--typed", help="The columns of the topic's schema, instead of the value's bytes.")
    ] = False,
    entries: Annotated[bool, typer.Option("--entries", help="One row per stored entry, with its raw bytes.")] = False,
    output_format: Annotated[
        Format | None, typer.Option("--format", help="Default: by the output's name, a table on a terminal, else json.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; replaced once everything is read.")] = None,
    on_bad_record: Annotated[str, typer.Option(help="Messages that cannot be decoded: fail, null or skip.")] = "fail",
    decryption_keys: Annotated[
        str | None,
        typer.Option(help="Private keys for encrypted messages: a directory with NAME.pem, or package.module:function."),
    ] = None,
    accept_loss: Annotated[bool, typer.Option("--accept-loss", help="Continue after a range that is no longer kept.")] = False,
    url: Annotated[str | None, typer.Option("--url", help=f"Service URL of any broker. Default: {DEFAULT_SERVICE_URL}")] = None,
    admin_url: Annotated[str | None, typer.Option(help="Or: admin URL of any broker.")] = None,
    metadata: Annotated[str | None, typer.Option(help="Or: the metadata store, when no broker runs (zk://host:2181/path).")] = None,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="CEPHEID_TOKEN", help="Token for brokers. In the environment it is hidden from other users of the machine."
        ),
    ] = None,
) -> None:
    """Print a topic's messages from storage, bypassing the brokers, or write them to a file."""
    _require_modules()
    if typed and entries:
        raise ReadCommandError("--typed and --entries are two kinds of rows; choose one")
    kind = _format(output_format, output)
    mode = "typed" if typed else "entries" if entries else "messages"
    named = _default_columns(kind, mode) if columns is None else _column_names(columns)
    from cepheid_scan import ScanCounters, scan

    logging.getLogger("cepheid_scan").addHandler(logging.NullHandler())  # a failed replica is not worth a line: another one answers
    counters = ScanCounters()
    if url is None and admin_url is None and metadata is None:
        admin_url = os.environ.get("CEPHEID_ADMIN_URL") or None
        url = DEFAULT_SERVICE_URL if admin_url is None else None
    with _errors_in_own_words():
        reader = scan(
            topic,
            service_url=url,
            admin_url=admin_url,
            metadata=metadata,
            token=token or None,
            start=start,
            end=end,
            columns=named,
            mode=mode,
            partitions=partition or None,
            on_bad_record=on_bad_record,
            fail_on_data_loss=not accept_loss,
            decryption_keys=decryption_keys,
            counters=counters,
            **_conditions(where or ()),
        )
        rows = _write(reader, kind, output, limit)
    _say_the_rest(rows, kind, output, counters)


@contextmanager
def _errors_in_own_words() -> Iterator[None]:
    from cepheid_scan import ScanError

    try:
        yield
    except ScanError as error:
        raise ReadCommandError(own_words(str(error))) from None


def own_words(text: str) -> str:
    """Return an error's text with the flags of this command."""
    for said, own in OWN_WORDS.items():
        text = text.replace(said, own)
    return text


def _write(reader: ScanReader, kind: Format, output: Path | None, limit: int | None) -> int:
    from cepheid_cli.row_writers import open_writer, terminal_width

    rows = 0
    with _opened(output) as out, reader:
        writer = open_writer(kind.value, out, reader.schema, width=terminal_width())
        while limit is None or rows < limit:
            try:
                batch = reader.read_next_batch()
            except StopIteration:
                break
            batch = batch if limit is None else batch.slice(0, limit - rows)
            writer.write(batch)
            rows += batch.num_rows
        writer.close()
    return rows


@contextmanager
def _opened(output: Path | None) -> Iterator[BinaryIO]:
    """Open standard output, or a file that gets its name only when everything is written."""
    if output is None:
        try:
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
        except BrokenPipeError:  # `| head`: no more output is wanted
            _drop_what_is_left()
            raise typer.Exit(BROKEN_PIPE_EXIT) from None
        except OSError as error:
            _drop_what_is_left()
            raise ReadCommandError(f"standard output cannot be written: {error}") from None
        return
    if os.path.isdir(output):  # other problems are reported when it is opened
        raise ReadCommandError(f"{output} is a directory: name a file in it", path=str(output))
    part = output.with_name(f".{output.name}.part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(output)
    except OSError as error:
        raise ReadCommandError(f"{output} cannot be written: {error}", path=str(output)) from None
    finally:
        with suppress(OSError):  # the directory does not exist, which was reported
            part.unlink(missing_ok=True)


def _drop_what_is_left() -> None:
    """Discard unwritten output, or the interpreter reports an error when it flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _say_the_rest(rows: int, kind: Format, output: Path | None, counters: ScanCounters) -> None:
    """Report what is not among the rows on standard error: missing rows must not look as if there were none."""
    if kind is Format.TABLE or output is not None:
        print(f"{rows:,} {'row' if rows == 1 else 'rows'}{f' in {output}' if output else ''}", file=sys.stderr)
    if counters.bad_records:
        print(f"cepheid: {counters.bad_records:,} messages could not be decoded", file=sys.stderr)
    if counters.damaged:
        print(f"cepheid: {counters.damaged:,} answers of bookies were damaged, see `cepheid ledgers verify`", file=sys.stderr)
    if counters.lost_entries:
        print(f"cepheid: {counters.lost_entries:,} entries are not kept any more", file=sys.stderr)


def _format(wanted: Format | None, output: Path | None) -> Format:
    terminal = output is None and _is_terminal()
    if wanted is Format.PARQUET and terminal:
        raise ReadCommandError("parquet is not for terminals: name a file with --output, or redirect standard output")
    if wanted is not None:
        return wanted
    if output is not None and (suffix := output.suffix.lstrip(".")) in list(Format):
        return Format(suffix)
    return Format.TABLE if terminal else Format.JSON


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def _column_names(text: str) -> Sequence[str]:
    names = tuple(name.strip() for name in text.split(","))
    if "" in names:
        raise ReadCommandError(f"--columns '{text}': a name is empty; write key,value, or leave the option out")
    return names


def _default_columns(kind: Format, mode: str) -> Sequence[str] | None:
    """Return the columns for a terminal, which is too narrow for all of them."""
    if kind is not Format.TABLE or mode == "typed":
        return None
    return ENTRY_TABLE_COLUMNS if mode == "entries" else TABLE_COLUMNS


def _conditions(words: Sequence[str]) -> dict[str, Any]:
    """Return the conditions of `--where` as arguments of `scan`."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in CONDITIONS:
            near = difflib.get_close_matches(name, CONDITIONS, n=1)
            known = f"did you mean {near[0]}=…?" if near else f"there is {', '.join(f'{known}=…' for known in CONDITIONS)}"
            raise ReadCommandError(f"--where {word}: no such condition; {known}", condition=word)
        if name == "key":
            found.setdefault("keys", []).append(value)
        elif name in found:
            raise ReadCommandError(f"--where {name} is given twice", condition=word)
        else:
            found[name] = value
    return found


def _require_modules() -> None:
    missing = [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ReadCommandError(f"`cepheid read` needs {', '.join(missing)}: pip install 'cepheid[spark]'")
