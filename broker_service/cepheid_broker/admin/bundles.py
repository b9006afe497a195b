"""Bundles as the API shows them (docs/reference/shapes.md §2, BundlesData)."""

from __future__ import annotations

from typing import Any

from cepheid_broker.ownership import boundaries


def bundles_data(count: int) -> dict[str, Any]:
    return {"boundaries": boundaries(count), "numBundles": count}
