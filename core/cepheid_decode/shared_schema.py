"""One schema for the rows of several topics: selects it, and checks whether the messages of other topics can be shown in its
columns.

The histories of topics may differ. While producers are upgraded, one topic has a version that others do not have yet, and a topic
that was created after the upgrade starts with it. Therefore the rows have the schema of one topic, and each message is decoded with
the definition that its own topic's history has for its version.

Rule 1. Topics without entries are ignored.
Rule 2. A topic is accepted if any of its versions fits: whether a message of another version fits is decided for that message
        (`onBadRecord`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from cepheid_decode.errors import BadOptionError
from cepheid_decode.history import HistoryPlan, SchemaVersion
from cepheid_decode.typed.avro_schema import Record, parse_avro
from cepheid_decode.typed.key_value import split_schema
from cepheid_decode.typed.typed_columns import rows_decoder, shown_schema
from cepheid_decode.typed.value_decoder import DifferentSchemaError
from cepheid_wire import TopicName

Histories = Mapping[str, Sequence[SchemaVersion]]
"""By topic without its partition, oldest version first."""

_Content = tuple[str | bytes, ...]


def base_of(topic: str) -> str:
    return str(TopicName.parse(topic).base)


def histories_of(plan: HistoryPlan, topics: Iterable[str]) -> dict[str, tuple[SchemaVersion, ...]]:
    """`topics`: with their partitions. A topic whose schema was deleted has an empty history, whatever was known before: the topic
    may have been deleted as well, and created again for other values."""
    return {base: tuple(plan.schemas.get(base, ())) for base in dict.fromkeys(map(base_of, topics))}


def rows_history(plan: HistoryPlan, reader_version: bytes | None) -> tuple[SchemaVersion, ...]:
    """Return the history of the topic whose schema the rows have: its `reader_version`, None: its newest. Empty if no topic has
    one.

    Raises BadOptionError: no schema can show the messages of all topics."""
    known = {topic: versions for topic, versions in plan.schemas.items() if versions}
    if reader_version is not None:
        having = {topic: all_ for topic, all_ in known.items() if any(each.version == reader_version for each in all_)}
        known = having or known
    if not known:
        return ()
    holding = {base_of(history.topic) for history in plan.topics if any(each.last_entry_id >= 0 for each in history.ledgers)}
    found = _shows_all(known, reader_version)
    if found is None:  # rule 1
        found = _shows_all({topic: versions for topic, versions in known.items() if topic in holding}, reader_version)
    if found is None:
        first, second, *_ = sorted(known.keys() & holding if len(known.keys() & holding) > 1 else known)
        raise BadOptionError(
            f"{first} and {second} have different schemas, of which none shows the rows of all topics: read them apart, or with "
            "readMode=messages",
            topics=sorted(known)[:10],
        )
    return tuple(known[found])


def check_shown(shown: SchemaVersion, histories: Histories) -> None:
    """For topics that are read. Raises BadOptionError that names the first whose messages cannot be shown in these columns."""
    known: dict[_Content, str] = {}  # there are many topics and few schemas
    for topic, versions in histories.items():
        why = "it has no schema"
        for version in reversed(versions):
            content = version.content
            if content not in known:
                known[content] = _why_not(version, shown)
            why = known[content]
            if not why:
                break
        if why:
            raise BadOptionError(
                f"{topic}: its messages cannot be shown in the columns of this read ({why}). Give it a schema that fits, leave "
                "it out of the topics (with failOnDataLoss=false where a checkpoint has it), or read with readMode=messages",
                topic=topic,
            )


def _shows_all(known: Histories, reader_version: bytes | None) -> str | None:
    """Return the topic whose schema shows all others. Of several, one that is not an older version of another's, with the most
    columns, the first."""
    shown = {topic: shown_schema(versions, reader_version) for topic, versions in sorted(known.items())}
    distinct: dict[_Content, str] = {}
    for topic, schema in shown.items():
        distinct.setdefault(schema.content, topic)
    able = [topic for topic in distinct.values() if all(not _why_not(shown[other], shown[topic]) for other in distinct.values())]
    newest = [topic for topic in able if not any(_is_older(shown[topic], shown[other], known.values()) for other in able)]
    if len(newest) == 1:
        return newest[0]
    return max(newest or able, key=lambda topic: len(rows_decoder(shown[topic], shown[topic]).fields), default=None)


def _is_older(one: SchemaVersion, other: SchemaVersion, histories: Iterable[Sequence[SchemaVersion]]) -> bool:
    """Whether some topic had `one` and later `other`, and no topic in the reverse order."""
    places = [[each.content for each in versions] for versions in histories]
    both = [each for each in places if one.content in each and other.content in each]
    ahead = {_last(each, one.content) < _last(each, other.content) for each in both}
    return ahead == {True}


def _last(contents: Sequence[_Content], content: _Content) -> int:
    return len(contents) - 1 - contents[::-1].index(content)


def _why_not(writer: SchemaVersion, shown: SchemaVersion) -> str:
    """Return why values of another topic's schema cannot be shown as this one, or an empty string. Fields with defaults fit any
    record, and JSON fits any definition: therefore records must also have the same name."""
    if writer.content == shown.content:
        return ""
    try:
        if writer.kind == shown.kind == "KEY_VALUE":
            sides = zip(split_schema(writer), split_schema(shown), strict=True)
            return next(filter(None, (_why_not(*side) for side in sides)), "")
        own, other = _record_name(writer), _record_name(shown)
        if own != other:
            return f"its record is {own}, not {other}"
        if writer.kind == shown.kind == "JSON":  # values are read only by names
            writer, shown = (SchemaVersion(each.version, "AVRO", each.definition) for each in (writer, shown))
        rows_decoder(writer, shown)
    except (DifferentSchemaError, BadOptionError) as error:
        return str(error)
    return ""


def _record_name(schema: SchemaVersion) -> str | None:
    """Return the name without its namespace; None: it is not a record. Raises BadOptionError."""
    match schema.kind:
        case "AVRO" | "JSON":
            node = parse_avro(schema.definition)
            name = node.name if isinstance(node, Record) else None
        case "PROTOBUF_NATIVE" | "PROTOBUF":
            name = _text_of(schema.definition, "rootMessageTypeName" if schema.kind == "PROTOBUF_NATIVE" else "name")
        case _:
            name = None
    return name if name is None else name.rpartition(".")[2]


def _text_of(definition: bytes, key: str) -> str | None:
    try:
        found = json.loads(definition)[key]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None
