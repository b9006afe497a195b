"""Options of a table created by SQL: CREATE TABLE t USING cepheid OPTIONS (…).

Spark passes the options to the source that infers the table's schema, but not when the table is read (seen in 4.3.0: the
reader gets only those of SELECT … WITH (…)). It keeps the schema with the metadata of columns, so they are stored there.

CREATE TABLE ──► schema() ──keep──► the first column's metadata ──catalog──► reader(schema) ──recall──► options
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cepheid_decode import BadOptionError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_KEY = "cepheid.options"
_PROVIDER = "provider"  # given only by CREATE TABLE, like the other names here (TableCatalog of Spark's connector API)
_OF_THE_CATALOG = frozenset({_PROVIDER, "owner", "location", "is_managed_location", "external", "comment", "collation", "path"})
_COPY_PREFIX = "option."  # prefix of a second copy of every option


def is_table_made(options: Mapping[str, str]) -> bool:
    return _PROVIDER in options and any(name.startswith(_COPY_PREFIX) for name in options)


def written_options(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options as the user wrote them."""
    if not is_table_made(options):
        return dict(options)
    return {name: text for name, text in options.items() if name not in _OF_THE_CATALOG and not name.startswith(_COPY_PREFIX)}


def keep(schema: StructType, options: Mapping[str, str]) -> StructType:
    """Return `schema` with the options at its first column. Raises BadOptionError if a secret would be written to the catalog."""
    from pyspark.sql.types import StructField, StructType

    from cepheid_spark.options import is_secret

    if "token" in options:
        raise BadOptionError("all users can read a table's options: give tokenEnv or tokenFile instead of token")
    if secret := next(filter(is_secret, options), None):
        raise BadOptionError(
            f"all users can read a table's options: leave {secret} out of it. Give it with the query (SELECT … FROM t WITH "
            "(…)), or have credentials of the object store in the environment of the driver and the executors"
        )
    first, *others = schema.fields
    noted = StructField(first.name, first.dataType, first.nullable, {_KEY: json.dumps(options, sort_keys=True)})
    return StructType([noted, *others])


def recall(schema: StructType, options: Mapping[str, str]) -> dict[str, str]:
    """Return the options of the table, if it is one, overridden by the given ones."""
    kept = next((field.metadata[_KEY] for field in schema.fields if field.metadata and _KEY in field.metadata), "{}")
    return {**json.loads(kept), **options}
