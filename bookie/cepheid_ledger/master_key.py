"""The key that keeps a stray client from writing to another client's ledger. It is not a security measure."""

from __future__ import annotations

from hashlib import sha256

from cepheid_metadata import LedgerMetadata
from cepheid_rpc import MASTER_KEY_BYTES


def master_key_of(ledger: LedgerMetadata) -> bytes:
    """Derive the key from the password in metadata, so that bookies never see the password itself."""
    return sha256(b"cepheid master key\0" + ledger.password).digest()[:MASTER_KEY_BYTES]
