"""Which versions a schema is compared with, and in which direction.

                     backward: new reads old     forward: old reads new      full: both
    latest           BACKWARD                    FORWARD                     FULL
    every version    BACKWARD_TRANSITIVE         FORWARD_TRANSITIVE          FULL_TRANSITIVE
A consumer reads: it must read the latest version, or every one if the strategy guarantees that to new readers.
"""

from __future__ import annotations

from cepheid_broker.errors import IncompatibleSchemaError
from cepheid_broker.policies import SchemaCompatibility
from cepheid_broker.schemas.definition import Definition, mismatch_of

S = SchemaCompatibility

_NEW_READS_OLD = frozenset({S.BACKWARD, S.BACKWARD_TRANSITIVE, S.FULL, S.FULL_TRANSITIVE})
_OLD_READS_NEW = frozenset({S.FORWARD, S.FORWARD_TRANSITIVE, S.FULL, S.FULL_TRANSITIVE})
_EVERY_VERSION = frozenset({S.BACKWARD_TRANSITIVE, S.FORWARD_TRANSITIVE, S.FULL_TRANSITIVE})
_EVERY_VERSION_FOR_CONSUMERS = frozenset({S.BACKWARD_TRANSITIVE, S.FULL_TRANSITIVE})


def in_force(strategy: SchemaCompatibility) -> SchemaCompatibility:
    """Return the strategy in force: UNDEFINED means the broker's default (docs/reference/behaviours.md §13)."""
    return S.FULL if strategy is S.UNDEFINED else strategy


def compares_every_version(strategy: SchemaCompatibility, *, for_consumer: bool = False) -> bool:
    return strategy in (_EVERY_VERSION_FOR_CONSUMERS if for_consumer else _EVERY_VERSION)


def check_successor(strategy: SchemaCompatibility, new: Definition, old: Definition, version: int) -> None:
    """Raise IncompatibleSchemaError if `new` must not follow `old`."""
    if strategy is S.ALWAYS_COMPATIBLE:
        return
    label = f"version {version}"
    if strategy is S.ALWAYS_INCOMPATIBLE:
        raise IncompatibleSchemaError(f"no schema may follow {label}: the strategy is {strategy.value}", version=version)
    if strategy in _NEW_READS_OLD and (found := mismatch_of(new, old)) is not None:
        raise IncompatibleSchemaError(
            f"the new schema cannot read data of {label} ({strategy.value}): {found.text('the new schema', label)}", version=version
        )
    if strategy in _OLD_READS_NEW and (found := mismatch_of(old, new)) is not None:
        raise IncompatibleSchemaError(
            f"{label} cannot read data of the new schema ({strategy.value}): {found.text(label, 'the new schema')}", version=version
        )


def check_reader(strategy: SchemaCompatibility, reader: Definition, written: Definition, version: int) -> None:
    """Raise IncompatibleSchemaError if a consumer with `reader` cannot read data of `version`."""
    label = f"version {version}"
    if strategy is not S.ALWAYS_COMPATIBLE and (found := mismatch_of(reader, written)) is not None:
        text = found.text("the consumer's schema", label)
        raise IncompatibleSchemaError(f"the consumer's schema cannot read data of {label}: {text}", version=version)
