"""Options of the sink `cepheid`: those of `df.write` and `df.writeStream`. docs/spark.md describes them for users."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cepheid_decode import BadOptionError
from cepheid_security.client_environment import NO_SECRETS, ClientSecrets
from cepheid_spark.option_values import OptionTable, Parse, address, duration, one_of, parse_bool, parse_text, refuse, whole_number
from cepheid_spark.options import OPTIONS, OTHER_NAMES, read_secrets
from cepheid_wire import InvalidTopicNameError, TopicName

SINK_MEMORY_S = 7 * 86400.0
MOST_BATCHES = (1 << 31) - 1
"""Maximum number of a micro-batch: it is the upper half of sequence ids, which have 63 bits."""
MOST_NAME_CHARACTERS = 200


def parse_name(name: str, text: str) -> str:
    """Check a name: it is part of producer names, which statistics and rows show."""
    if not text.strip() or not text.isprintable() or len(text) > MOST_NAME_CHARACTERS:
        raise refuse(name, text, f"a printable name of up to {MOST_NAME_CHARACTERS} characters")
    return text.strip()


SINK_OPTIONS: Mapping[str, Parse[Any]] = {
    # the cluster and credentials
    "serviceUrl": address("pulsar", "pulsar+ssl"),
    "token": parse_text,
    "tokenEnv": parse_text,
    "tokenFile": parse_text,
    "oauth2File": parse_text,
    "oauth2Audience": parse_text,
    "user": parse_text,
    "password": parse_text,
    "passwordEnv": parse_text,
    "passwordFile": parse_text,
    "tlsTrustCerts": parse_text,
    "tlsCertFile": parse_text,
    "tlsKeyFile": parse_text,
    "tlsValidateHostname": parse_bool,
    # content and destination
    "topic": parse_text,
    "encode": one_of("avro", "json"),
    "keyHash": one_of("java_string", "boost", "murmur3"),
    "onTooLarge": one_of("fail", "chunk"),
    "compression": one_of("none", "zlib", "lz4", "zstd", "snappy"),
    # exactly once, or at least once
    "exactlyOnce": parse_bool,
    "order": one_of("sorted", "asis"),
    "sinkName": parse_name,
    "sinkMemory": duration(least_s=60.0, most_s=366 * 86400.0),
    "batchId": whole_number(least=0, most=MOST_BATCHES),
    "sendTimeout": duration(least_s=1.0),
}
_OF_READING = "is only for reading: leave it out of a write"
_REFUSED = {name: _OF_READING for name in (*OPTIONS, *OTHER_NAMES) if name not in SINK_OPTIONS}
_REFUSED |= {
    "topics": "is only for reading: a write has one topic, or a column topic",
    "adminUrl": "is only for reading: a write needs serviceUrl",
}
_TABLE = OptionTable(
    SINK_OPTIONS, refused=_REFUSED, refused_prefixes={"producer.": "is not served: a write chooses itself how it sends"}
)
_OF_SPARK = frozenset({"checkpointlocation", "queryname", "path"})
"""Names that Spark passes with the options of a streaming write. A path is refused separately, with advice."""


@dataclass(frozen=True, slots=True)
class SinkSecurity:
    """How the client of a task connects. No repr shows secrets."""

    secrets: ClientSecrets = NO_SECRETS
    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    check_hostname: bool = True


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """All checked options of a write. `topic` None: rows name theirs. `name` None: the query's id, or that of the job."""

    service_url: str
    security: SinkSecurity
    topic: str | None = None
    encode: str | None = None
    key_hash: str = "java_string"
    chunks_large: bool = False
    compression: str = "none"
    exactly_once: bool = True
    is_sorted: bool = True
    name: str | None = None
    memory_s: float = SINK_MEMORY_S
    batch_id: int | None = None
    send_timeout_s: float = 120.0


def parse_sink_options(options: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """Raises BadOptionError."""
    if options.get("path"):
        raise BadOptionError(
            "save() and start() accept no path here: name the topic by .option('topic', …), or by a column", option="path"
        )
    given = _TABLE.parse({name: text for name, text in options.items() if name.lower() not in _OF_SPARK})
    if "serviceUrl" not in given:
        raise BadOptionError("where is the cluster? a write needs the option service.url (pulsar://host:port)", option="serviceUrl")
    exactly_once = given.get("exactlyOnce", True)
    for name in ("sinkName", "sinkMemory", "batchId", "order"):
        if name in given and not exactly_once:
            raise BadOptionError(f"option {name} has no effect with exactlyOnce=false: leave one of the two out", option=name)
    if streaming and "batchId" in given:
        raise BadOptionError("option batchId is for df.write: a streaming query numbers its micro-batches itself", option="batchId")
    if not streaming and exactly_once and ("batchId" in given) != ("sinkName" in given):
        raise BadOptionError(
            "options sinkName and batchId belong together in df.write: give both, and a write that is repeated with the same two "
            "and the same rows is stored once; or neither",
            option="sinkName",
        )
    return SinkOptions(
        service_url=given["serviceUrl"],
        security=SinkSecurity(
            secrets=read_secrets(given),
            ca_file=given.get("tlsTrustCerts"),
            certificate_file=given.get("tlsCertFile"),
            key_file=given.get("tlsKeyFile"),
            check_hostname=given.get("tlsValidateHostname", True),
        ),
        topic=None if "topic" not in given else full_topic_name(given["topic"]),
        encode=given.get("encode"),
        key_hash=given.get("keyHash", "java_string"),
        chunks_large=given.get("onTooLarge", "fail") == "chunk",
        compression=given.get("compression", "none"),
        exactly_once=exactly_once,
        is_sorted=exactly_once and given.get("order", "sorted") == "sorted",
        name=given.get("sinkName"),
        memory_s=given.get("sinkMemory", SINK_MEMORY_S),
        batch_id=given.get("batchId"),
        send_timeout_s=given.get("sendTimeout", 120.0),
    )


def full_topic_name(name: str) -> str:
    """Return the full name of a topic that can be written. Raises BadOptionError."""
    try:
        return str(TopicName.parse(name))
    except InvalidTopicNameError as error:
        raise BadOptionError(str(error), topic=name[:200]) from None
