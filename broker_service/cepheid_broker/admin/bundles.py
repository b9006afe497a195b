"""Bundles in the format of the API (docs/reference/shapes.md §2, BundlesData)."""

from __future__ import annotations

from typing import Any

from cepheid_broker.ownership import boundaries, division_of
from cepheid_metadata import NamespaceRecord


def bundles_data(record: NamespaceRecord) -> dict[str, Any]:
    return {"boundaries": boundaries(division_of(record)), "numBundles": record.bundles}
