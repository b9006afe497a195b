"""Options of the source `cepheid`: their names, and their conversion to a request. docs/spark.md describes them for users.

Names are compared without case, dots and underscores: service.url, serviceUrl and SERVICE_URL are one option. An unknown name is an
error that names the nearest known one; so is an option that is not supported yet. Options that a batch read does not use
(maxBytesPerTrigger, …) are accepted there: one table definition serves batch and stream.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from cepheid_decode import (
    EARLIEST,
    LATEST,
    BadOptionError,
    Edge,
    OnBadRecord,
    PlanSource,
    ReadMode,
    ReadSettings,
    RowFilter,
    ScanRequest,
    ScanSpec,
    SchemaVersion,
    StorageAccess,
    TopicSelection,
)
from cepheid_scan.edge_words import parse_edge
from cepheid_scan.scan_arguments import secrets_of_environment
from cepheid_security import ClientTls, SecurityConfigurationError
from cepheid_security.client_environment import ClientSecrets, TokenFile, oauth2_credentials
from cepheid_spark.option_values import (
    OptionTable,
    Parse,
    address,
    duration,
    one_of,
    parse_bool,
    parse_list,
    parse_numbers,
    parse_regex,
    parse_text,
    parse_time_ms,
    plain_name,
    refuse,
    size,
    whole_number,
)
from cepheid_wire import InvalidTopicNameError, TopicName

log = logging.getLogger(__name__)

MiB = 1 << 20
NO_SUBSCRIPTION = "none"
BATCH_LEASE_S = 6 * 3600.0
STREAM_LEASE_S = 7 * 86400.0


def parse_filter_pushdown(name: str, text: str) -> None:
    """Accept `false` in this release, with a warning; the option was removed. Raises BadOptionError for `true`."""
    if parse_bool(name, text):
        raise BadOptionError(
            f"option {name}: 'true' is not accepted: Spark applies the filters of a DataFrame's first query to its later queries "
            "too, so they returned wrong rows. Leave the option out; to read less, give startingTimestamp, endingTimestamp, keys, "
            "partitions, eventTimeFrom or eventTimeUntil",
            option=name,
        )
    log.warning("option %s does nothing, and the next release will refuse it: leave it out", name)


OPTIONS: Mapping[str, Parse[Any]] = {
    # the cluster
    "serviceUrl": address("pulsar", "pulsar+ssl", "http", "https"),
    "adminUrl": address("http", "https"),
    "metadata": address("zk", "zks"),
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
    # what to read
    "topic": parse_text,
    "topics": parse_list,
    "topicsPattern": parse_regex,
    "partitions": parse_numbers,
    "failOnMissingTopic": parse_bool,
    "startingOffsets": parse_text,
    "startingTimestamp": parse_time_ms,
    "endingOffsets": parse_text,
    "endingTimestamp": parse_time_ms,
    "timestampSkew": duration(),
    "eventTimeFrom": parse_time_ms,
    "eventTimeUntil": parse_time_ms,
    "keys": parse_list,
    # the form of rows
    "readMode": one_of("messages", "entries", "typed"),
    "columns": parse_list,
    "columnStyle": one_of("plain", "pulsar-spark"),
    "schemaVersion": parse_text,
    "decryptionKeys": parse_text,
    "onBadRecord": one_of("fail", "null", "skip"),
    "failOnDataLoss": parse_bool,
    "filterPushdown": parse_filter_pushdown,
    # tasks, and how they read
    "targetPartitionBytes": size(least=MiB),
    "minPartitions": whole_number(least=1, most=50_000),
    "rack": parse_text,
    "bookieReadTimeout": duration(least_s=0.1),
    "readAttempts": whole_number(least=1, most=1000),
    "unreachableTimeout": duration(),
    "chunkBytes": size(least=64 << 10, most=64 * MiB),
    "decodeBytes": size(least=64 << 10, most=1 << 30),
    "verifyChecksum": parse_bool,
    "chunkLookback": whole_number(least=0, most=1_000_000),
    "freezeGc": parse_bool,
    # for ledgers in object storage
    "preferBookies": parse_bool,
    "storageAccessKey": parse_text,
    "storageSecretKey": parse_text,
    "storageSessionToken": parse_text,
    "storageEndpoint": parse_text,
    "storageRegion": parse_text,
    # micro-batches, and the lease of a query
    "maxBytesPerTrigger": size(),
    "maxEntriesPerTrigger": whole_number(least=1),
    "minBytesPerTrigger": size(),
    "maxTriggerDelay": duration(),
    "subscription": parse_text,
    "leaseTtl": duration(least_s=1.0),
    "topicDiscoveryInterval": duration(least_s=0.1),
    "metadataRetry": duration(),
}
OTHER_NAMES = {"publishedFrom": "startingTimestamp", "publishedUntil": "endingTimestamp"}
_OF_WRITING = "is for writing alone: give it to df.write or df.writeStream"
_NO_PLUGINS = "is not served yet: it belongs to authentication plugins (a token is taken: tokenEnv, tokenFile)"
_NOT_SERVED = dict.fromkeys(
    ("exactlyOnce", "order", "sinkName", "sinkMemory", "batchId", "encode", "onTooLarge", "keyHash", "compression", "sendTimeout"),
    _OF_WRITING,
)
_NOT_SERVED |= dict.fromkeys(("authPlugin", "authParams"), _NO_PLUGINS)
_NOT_SERVED["tlsValidateHostname"] = "is not served: host names are always checked"
_NOT_SERVED_PREFIXES = {"producer.": "is not served: a write chooses itself how it sends"}
SECRETS = ("token", "password", "storageAccessKey", "storageSecretKey", "storageSessionToken")
"""Options whose values nothing may show. Spark's logs leave out what matches `spark.redaction.regex`; by default these do."""


@dataclass(frozen=True, slots=True)
class SourceOptions(ScanRequest):
    """All checked options of a source: a scan, whose columns are still to be chosen, and settings for Spark.

    `columns` None: the mode's own. Limits None: none. Times in seconds, sizes in bytes.
    """

    columns: tuple[str, ...] | None = None
    column_style: str = "plain"
    freeze_gc: bool = True
    max_bytes_per_trigger: int | None = None
    max_entries_per_trigger: int | None = None
    min_bytes_per_trigger: int | None = None
    max_trigger_delay_s: float = 900.0
    subscription: str | None = None  # of the lease, never that of the start; None: a name is created
    has_lease: bool = True  # subscription=none: no lease
    lease_ttl_s: float = BATCH_LEASE_S
    topic_discovery_s: float = 30.0
    metadata_retry_s: float = 60.0

    def reading(self, columns: tuple[str, ...], schemas: tuple[SchemaVersion, ...] = ()) -> Self:
        """Return the same options with the columns of tasks, and the schema versions of typed rows."""
        return replace(self, spec=replace(self.spec, columns=columns, schemas=schemas))


_FIELDS = {
    "targetPartitionBytes": "target_task_bytes",
    "minPartitions": "min_tasks",
    "columnStyle": "column_style",
    "freezeGc": "freeze_gc",
    "maxBytesPerTrigger": "max_bytes_per_trigger",
    "maxEntriesPerTrigger": "max_entries_per_trigger",
    "minBytesPerTrigger": "min_bytes_per_trigger",
    "maxTriggerDelay": "max_trigger_delay_s",
    "topicDiscoveryInterval": "topic_discovery_s",
    "metadataRetry": "metadata_retry_s",
}
"""Options whose values are used unchanged as fields. Without them the fields' defaults apply."""


def parse_options(options: Mapping[str, str], *, streaming: bool) -> SourceOptions:
    """Raises BadOptionError."""
    given = _parse_values(options)
    start, end = _edges(given, streaming=streaming)
    subscription = given.get("subscription")
    mode, row_filter, source = ReadMode(given.get("readMode", "messages")), _row_filter(given), _plan_source(given)
    row_filter.check_for(mode)
    return SourceOptions(
        source=source,
        topics=_topic_selection(given),
        spec=ScanSpec(
            mode=mode,
            columns=(),
            row_filter=row_filter,
            on_bad_record=OnBadRecord(given.get("onBadRecord", "fail")),
            fail_on_data_loss=given.get("failOnDataLoss", True),
            settings=_read_settings(given),
            reader_version=_reader_version(given.get("schemaVersion", "latest"), mode),
            plan_source=source,
            storage=_storage_access(given),
            decryption_keys=given.get("decryptionKeys"),  # loaded by the tasks
        ),
        start=start,
        end=end,
        timestamp_skew_ms=int(given.get("timestampSkew", 60.0) * 1000),
        columns=_columns(given),
        subscription=None if subscription in (NO_SUBSCRIPTION, start.subscription) else subscription,
        has_lease=subscription != NO_SUBSCRIPTION,
        lease_ttl_s=given.get("leaseTtl", STREAM_LEASE_S if streaming else BATCH_LEASE_S),
        **{field: given[name] for name, field in _FIELDS.items() if name in given},
    )


def is_secret(written: str) -> bool:
    """Return whether nothing may show the option of this name, as a user wrote it."""
    return plain_name(written) in {plain_name(name) for name in SECRETS}


_TABLE = OptionTable(OPTIONS, OTHER_NAMES, _NOT_SERVED, _NOT_SERVED_PREFIXES)


def _parse_values(options: Mapping[str, str]) -> dict[str, Any]:
    if any(plain_name(written) == "path" for written in options):
        raise BadOptionError("load() accepts no path here: name the topic by .option('topic', …)", option="path")
    return _TABLE.parse(options)


def _plan_source(given: Mapping[str, Any]) -> PlanSource:
    urls = [given.get(name) for name in ("serviceUrl", "adminUrl", "metadata")]
    if not any(urls):
        raise BadOptionError(
            "where is the cluster? give service.url (pulsar://host:port), admin.url (http://host:port) or metadata (zk://host:port)"
        )
    service_url, admin_url, metadata = urls
    retry_s = given.get("metadataRetry", 60.0)
    return PlanSource(
        service_url=service_url,
        admin_url=admin_url,
        metadata=metadata,
        secrets=read_secrets(given),
        retry_s=retry_s,
        tls=_tls(given),
    )


def _tls(given: Mapping[str, Any]) -> ClientTls | None:
    """Return the files of TLS, which driver and executors read; None: use those of their environments."""
    ca_file, certificate_file, key_file = (given.get(name) for name in ("tlsTrustCerts", "tlsCertFile", "tlsKeyFile"))
    if (certificate_file is None) != (key_file is None):
        raise BadOptionError("options tlsCertFile and tlsKeyFile must be given together")
    crl = ClientTls.from_environment().crl if ca_file else None
    return ClientTls(ca_file, certificate_file, key_file, crl) if ca_file or certificate_file else None


def read_secrets(given: Mapping[str, Any]) -> ClientSecrets:
    """Return the credentials for brokers, from the options, otherwise from the driver's environment. Errors contain no secret."""
    named = [name for name in ("token", "tokenEnv", "tokenFile", "oauth2File", "user") if name in given]
    if len(named) > 1:
        raise BadOptionError(f"options {' and '.join(named)} exclude each other: give one")
    if "oauth2Audience" in given and "oauth2File" not in given:
        raise BadOptionError("option oauth2Audience is for the tokens of oauth2File: give both", option="oauth2Audience")
    if "user" in given or any(name in given for name in _PASSWORDS):
        return ClientSecrets(password=_user_and_password(given))
    if "oauth2File" in given:
        try:
            return ClientSecrets(oauth2_credentials(given["oauth2File"], given.get("oauth2Audience")))
        except SecurityConfigurationError as error:
            raise BadOptionError(f"option oauth2File: {error}", option="oauth2File") from None
    if "tokenEnv" in given:
        return ClientSecrets(_of_environment(given, "tokenEnv"))
    if "tokenFile" in given:
        return ClientSecrets(TokenFile(given["tokenFile"], _of_file(given, "tokenFile")))
    if token := given.get("token"):
        return ClientSecrets(token)
    return secrets_of_environment()


_PASSWORDS = ("password", "passwordEnv", "passwordFile")


def _user_and_password(given: Mapping[str, Any]) -> tuple[str, str]:
    named = [name for name in _PASSWORDS if name in given]
    if "user" not in given or len(named) != 1:
        raise BadOptionError("option user and one of password, passwordEnv and passwordFile belong together", option="user")
    if ":" in given["user"]:
        raise BadOptionError("option user: a user name must not contain a colon", option="user")
    read = {"passwordEnv": _of_environment, "passwordFile": _of_file}.get(named[0])
    return given["user"], given["password"] if read is None else read(given, named[0])


def _of_environment(given: Mapping[str, Any], option: str) -> str:
    variable = given[option]
    if variable not in os.environ:
        raise BadOptionError(f"option {option}: the driver's environment has no variable {variable}", option=option)
    return os.environ[variable]


def _of_file(given: Mapping[str, Any], option: str) -> str:
    try:
        return Path(given[option]).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadOptionError(f"option {option}: cannot read {given[option]}: {error}", option=option) from None


def _storage_access(given: Mapping[str, Any]) -> StorageAccess:
    access = StorageAccess(
        access_key=given.get("storageAccessKey"),
        secret_key=given.get("storageSecretKey"),
        session_token=given.get("storageSessionToken"),
        endpoint=given.get("storageEndpoint"),
        region=given.get("storageRegion"),
    )
    if (access.access_key is None) != (access.secret_key is None):
        raise BadOptionError("options storageAccessKey and storageSecretKey must be given together")
    if access.session_token is not None and access.access_key is None:
        raise BadOptionError("option storageSessionToken needs storageAccessKey and storageSecretKey, which it was issued with")
    return access


def _topic_selection(given: Mapping[str, Any]) -> TopicSelection:
    named = [name for name in ("topic", "topics", "topicsPattern") if name in given]
    if len(named) != 1:
        said = f"given are {' and '.join(named)}" if named else "none is given"
        raise BadOptionError(f"which topics? exactly one of the options topic, topics and topicsPattern is needed; {said}")
    chosen = TopicSelection(partitions=given.get("partitions"), fail_on_missing=given.get("failOnMissingTopic", True))
    if named == ["topicsPattern"]:
        return replace(chosen, pattern=given["topicsPattern"])
    names = given["topics"] if named == ["topics"] else (given["topic"],)
    return replace(chosen, names=tuple(dict.fromkeys(_full_topic_name(named[0], name) for name in names)))


def _full_topic_name(option: str, name: str) -> str:
    try:
        topic = TopicName.parse(name)
    except InvalidTopicNameError as error:
        raise BadOptionError(f"option {option}: {error}", option=option) from None
    if not topic.is_persistent:
        raise BadOptionError(f"option {option}: {topic} is not persistent, so it has no history to read", option=option)
    return str(topic)


def _edges(given: Mapping[str, Any], *, streaming: bool) -> tuple[Edge, Edge]:
    starting, ending = given.get("startingOffsets"), given.get("endingOffsets")
    if starting is None:
        start = LATEST if streaming else EARLIEST
    elif starting.lower() in ("earliest", "latest"):
        start = EARLIEST if starting.lower() == "earliest" else LATEST
    elif starting.lower().partition(":")[0] == "subscription":
        start = Edge(subscription=_starting_subscription(starting, given.get("subscription")))
    else:
        start = _positions("startingOffsets", starting, word="earliest")
    if "startingTimestamp" in given:
        start = Edge(publish_time_ms=given["startingTimestamp"])
    if start == LATEST and not streaming:
        raise BadOptionError("startingOffsets=latest: a batch from there on reads nothing; give earliest, positions or a timestamp")
    end = LATEST if ending is None or ending.lower() == "latest" else _positions("endingOffsets", ending, word="latest")
    if "endingTimestamp" in given:
        end = Edge(publish_time_ms=given["endingTimestamp"])
    start.check_before(end)
    return start, end


def _starting_subscription(starting: str, lease: str | None) -> str:
    """Return the subscription to start at: by default that of the option subscription, and the lease then gets a created name."""
    _, mark, name = starting.partition(":")
    if not mark and lease not in (None, NO_SUBSCRIPTION):
        return lease
    if not name:
        raise BadOptionError(
            f"option startingOffsets: '{starting}' names no subscription; give startingOffsets=subscription:NAME (beside "
            "subscription=none, too), or its name by the option subscription",
            option="startingOffsets",
        )
    return name


def _positions(option: str, text: str, *, word: str) -> Edge:
    """Return the positions. `word` applies to topics that are not named, so it may also be given for some of them."""
    accepted = f'{word}, or JSON of positions by topic partition: {{"persistent://public/default/t-partition-0": "12:345"}}'
    if option == "startingOffsets":
        accepted = f"latest (streams), subscription:NAME, {accepted}"
    try:
        by_topic = json.loads(text)
    except (ValueError, RecursionError):  # the second: for deeply nested brackets
        raise refuse(option, text, accepted) from None
    if not isinstance(by_topic, dict) or not by_topic or not all(isinstance(place, str) for place in by_topic.values()):
        raise refuse(option, text, accepted)
    for name in by_topic:
        _full_topic_name(option, name)
    named = {name: place for name, place in by_topic.items() if place.lower() != word}
    if not named:
        return EARLIEST if word == "earliest" else LATEST
    try:
        return parse_edge(named)
    except BadOptionError as error:
        raise BadOptionError(f"option {option}: {error}", option=option) from None


def _row_filter(given: Mapping[str, Any]) -> RowFilter:
    """Return the filter. Publish times are edges of the range, which the planner adds."""
    keys = frozenset(given["keys"]) if "keys" in given else None
    return RowFilter(event_from_ms=given.get("eventTimeFrom"), event_until_ms=given.get("eventTimeUntil"), keys=keys)


def _columns(given: Mapping[str, Any]) -> tuple[str, ...] | None:
    columns: tuple[str, ...] | None = given.get("columns")
    if columns is not None and len(set(columns)) != len(columns):
        twice = next(name for name in columns if columns.count(name) > 1)
        raise BadOptionError(f"option columns names {twice} twice", option="columns")
    return columns


def _reader_version(text: str, mode: ReadMode) -> bytes | None:
    if text.strip().lower() == "latest":
        return None
    if mode is not ReadMode.TYPED:
        raise BadOptionError(
            f"option schemaVersion: only rows of readMode=typed are shown as a version, and this is {mode.value}",
            option="schemaVersion",
        )
    number: int = whole_number(least=0, most=(1 << 63) - 1)("schemaVersion", text)
    return number.to_bytes(8, "big")


def _read_settings(given: Mapping[str, Any]) -> ReadSettings:
    fields = {
        "rack": "rack",
        "bookieReadTimeout": "read_timeout_s",
        "readAttempts": "read_attempts",
        "unreachableTimeout": "unreachable_s",
        "chunkBytes": "chunk_bytes",
        "decodeBytes": "decode_bytes",
        "verifyChecksum": "verify_checksum",
        "chunkLookback": "chunk_lookback",
        "preferBookies": "prefer_bookies",
    }
    return ReadSettings(**{field_name: given[name] for name, field_name in fields.items() if name in given}, tls=_tls(given))
