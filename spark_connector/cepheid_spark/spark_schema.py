"""The rows' schema in Spark's terms, and the columns requested by a user's schema.

options ──► available columns ──► rows_schema: what load() shows            the mode's own, or those of the option `columns`
                              └─► choose_columns: what .schema(…) requests  names and order are the user's; types are ours
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from cepheid_decode import BadOptionError, ReadMode, SchemaVersion
from cepheid_spark.column_styles import PLAIN, RowLayout, layout_of, styled_types
from cepheid_spark.options import SourceOptions

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


def rows_schema(options: SourceOptions, schemas: Sequence[SchemaVersion] = ()) -> StructType:
    """Return the schema of load() without a schema. Raises BadOptionError."""
    from pyspark.sql.pandas.types import from_arrow_type
    from pyspark.sql.types import StructField, StructType

    types = _available_types(options, schemas)
    names = options.columns or _default_columns(options, schemas, types)
    _check_names(names, types, "option columns")
    return StructType([StructField(name, from_arrow_type(types[name])) for name in names])


def choose_columns(schema: StructType, options: SourceOptions, schemas: Sequence[SchemaVersion] = ()) -> RowLayout:
    """Return the layout for these rows. Raises BadOptionError for a name or type that the scan does not have."""
    from pyspark.sql.pandas.types import from_arrow_type

    types = _available_types(options, schemas)
    _check_names(schema.names, types, "the schema")
    for field in schema.fields:
        ours = from_arrow_type(types[field.name])
        # This text of a type omits nullability: declarations of maps and lists may differ from Arrow's in that.
        if field.dataType.simpleString() != ours.simpleString():
            raise BadOptionError(
                f"column {field.name} is {ours.simpleString()}, the schema declares {field.dataType.simpleString()}: "
                "declare it as it is and cast it in the query",
                column=field.name,
            )
        if not field.nullable:
            raise BadOptionError(f"the schema declares {field.name} as NOT NULL: declare it nullable, like every column")
    return layout_of(schema.names, options.spec.mode, options.column_style)


def _available_types(options: SourceOptions, schemas: Sequence[SchemaVersion]) -> dict[str, pa.DataType]:
    from cepheid_decode.columns import ENTRY_COLUMNS, ERROR_COLUMN, MESSAGE_COLUMNS, metadata_columns, schema_columns

    match options.spec.mode:
        case ReadMode.ENTRIES:
            return styled_types(ENTRY_COLUMNS, options.spec.mode, options.column_style)
        case ReadMode.MESSAGES:
            return styled_types(MESSAGE_COLUMNS, options.spec.mode, options.column_style)
    more = metadata_columns()
    types = {**schema_columns(schemas, options.spec.reader_version), **more}
    return styled_types(types, options.spec.mode, options.column_style) | {ERROR_COLUMN: more[ERROR_COLUMN]}


def _default_columns(options: SourceOptions, schemas: Sequence[SchemaVersion], types: Mapping[str, pa.DataType]) -> Sequence[str]:
    from cepheid_decode.columns import ERROR_COLUMN
    from cepheid_scan.scan import default_columns

    if options.column_style != PLAIN:
        return [name for name in types if name != ERROR_COLUMN]
    return default_columns(options.reading((), tuple(schemas)).spec)


def _check_names(names: Iterable[str], types: Mapping[str, pa.DataType], where: str) -> None:
    for name in names:
        if name not in types:
            near = difflib.get_close_matches(name, types, n=1, cutoff=0.5)
            advice = f"did you mean {near[0]}? " if near else ""
            raise BadOptionError(
                f"{where} names {name}, which is not a column here; {advice}columns are: {', '.join(types)}", column=name
            )


def load_topic_schemas(options: SourceOptions) -> tuple[SchemaVersion, ...]:
    """Return the schemas of the topic whose schema the rows have, oldest first; empty in other modes.

    Raises BadOptionError, NoSuchTopicError, PlanUnavailableError.
    """
    if options.spec.mode is not ReadMode.TYPED:
        return ()
    from cepheid_decode.shared_schema import rows_history
    from cepheid_scan.open_planner import open_planner

    with closing(open_planner(options.source)) as planner:
        return rows_history(planner.plan(planner.topics(options.topics), schemas=True), options.spec.reader_version)


def with_reader_version(options: SourceOptions, schemas: Sequence[SchemaVersion]) -> SourceOptions:
    """Return the options with the newest version as the rows' schema:

    one registered while the query runs is read, but not shown.
    """
    if options.spec.mode is not ReadMode.TYPED or options.spec.reader_version is not None or not schemas:
        return options
    return replace(options, spec=replace(options.spec, reader_version=schemas[-1].version))
