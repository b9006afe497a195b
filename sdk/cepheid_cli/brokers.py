"""`cepheid brokers`: the brokers of a cluster."""

from __future__ import annotations

from cepheid_cli.admin.common import sub_app

app = sub_app("brokers", "Brokers of a cluster (docs/operations.md).")
