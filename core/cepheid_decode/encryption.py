"""What is needed to decrypt a message, as text: shown in the properties of messages that are returned as stored."""

from __future__ import annotations

import base64

from cepheid_decode.entry_metadata import EntryTable
from cepheid_wire import pulsar_api_pb2 as pb


def encryption_context(entries: EntryTable, row: int) -> dict[str, str]:
    """Return `encryption.algorithm`, `.param`, `.key.NAME` and `.key.NAME.METADATA`; binary values in base64. And properties of the
    decrypted payload: `.compression`, `.uncompressed_size`, `.num_messages` (of a batch)."""
    metadata = pb.MessageMetadata.FromString(entries.metadata_bytes(row))
    context = {
        "encryption.algorithm": _text(metadata.encryption_algo),
        "encryption.param": base64.b64encode(metadata.encryption_param).decode(),
        "encryption.compression": pb.CompressionType.Name(metadata.compression),
        "encryption.uncompressed_size": str(metadata.uncompressed_size),
    }
    if metadata.HasField("num_messages_in_batch"):
        context["encryption.num_messages"] = str(metadata.num_messages_in_batch)
    for key in metadata.encryption_keys:
        name = f"encryption.key.{_text(key.key)}"
        context[name] = base64.b64encode(key.value).decode()
        context |= {f"{name}.{_text(pair.key)}": _text(pair.value) for pair in key.metadata}
    return context


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="backslashreplace")
