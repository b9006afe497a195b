"""The topic's schema as Arrow columns. The table of types is in arrow_types.py."""

from cepheid_decode.typed.typed_columns import TypedColumns, TypedResult, typed_fields

__all__ = ["TypedColumns", "TypedResult", "typed_fields"]
