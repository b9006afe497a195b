"""Settings of the recorded servers: low limits, so that a small amount of data produces every kind of record."""

from __future__ import annotations

from typing import Any

BROKER: dict[str, Any] = {
    "managed_ledger": {"cursor_inline_bytes": 256},  # larger acknowledgement states are stored in a cursor ledger
    "ledger": {"deletion_grace_s": 3.0e9},  # deleted ledgers can still be undeleted when the data is read
}
STANDALONE_TOML = "".join(
    f"[{table}]\n" + "".join(f"{name} = {value}\n" for name, value in values.items()) for table, values in BROKER.items()
)
