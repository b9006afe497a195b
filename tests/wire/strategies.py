"""Protobuf bytes as peers may write them: any fields, in any order, with fields between them that we do not know."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from cepheid_wire.varint import varint

INTEGERS = {
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1) | st.integers(0, 300),
    FieldDescriptor.TYPE_INT64: st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 300),
    FieldDescriptor.TYPE_UINT32: st.integers(0, 2**32 - 1) | st.integers(0, 300),
    FieldDescriptor.TYPE_INT32: st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 300),
}
FIRST_UNKNOWN_FIELD = 1000  # no message of the protocol comes near it


def _value(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.type in INTEGERS:
        return INTEGERS[field.type]
    if field.type == FieldDescriptor.TYPE_STRING:
        return st.text("ab/-1é✈\x00", max_size=12)  # a fixed alphabet: building the one of all Unicode takes a second
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=12)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return st.floats(allow_nan=False)
    assert field.type == FieldDescriptor.TYPE_ENUM
    return st.sampled_from([value.number for value in field.enum_type.values])


@st.composite
def messages(draw: st.DrawFn, kind: type[Message], depth: int = 3) -> Message:
    """A complete message: required fields set, others perhaps."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if not field.is_required and (depth == 0 or not draw(st.booleans())):
            continue
        target = getattr(message, field.name)
        if field.message_type is not None:
            inner = messages(field.message_type._concrete_class, depth - 1 if depth else 0)
            if field.is_repeated:
                target.extend(draw(st.lists(inner, max_size=3)))
            else:
                target.CopyFrom(draw(inner))
                target.SetInParent()
        elif field.is_repeated:
            target.extend(draw(st.lists(_value(field), max_size=3)))
        else:
            setattr(message, field.name, draw(_value(field)))
    return message


def unknown_fields() -> st.SearchStrategy[bytes]:
    number = st.integers(FIRST_UNKNOWN_FIELD, 2**29 - 1)
    return st.one_of(
        st.builds(lambda n, v: varint(n << 3) + varint(v), number, st.integers(0, 2**64 - 1)),
        st.builds(lambda n, v: varint(n << 3 | 1) + v, number, st.binary(min_size=8, max_size=8)),
        st.builds(lambda n, v: varint(n << 3 | 2) + varint(len(v)) + v, number, st.binary(max_size=20)),
        st.builds(lambda n, v: varint(n << 3 | 5) + v, number, st.binary(min_size=4, max_size=4)),
    )


@st.composite
def shuffled(draw: st.DrawFn, message: Message) -> bytes:
    """The bytes of `message` with its fields in any order and unknown ones between them."""
    pieces = draw(st.lists(unknown_fields(), max_size=3))
    for field, value in message.ListFields():
        only = type(message)()
        target = getattr(only, field.name)
        if field.is_repeated:
            target.extend(value)
        elif field.message_type is not None:
            target.CopyFrom(value)
            target.SetInParent()
        else:
            setattr(only, field.name, value)
        pieces.append(only.SerializePartialToString())
    return b"".join(draw(st.permutations(pieces)))
