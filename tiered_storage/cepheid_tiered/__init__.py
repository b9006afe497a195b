"""Ended ledgers as Parquet in object storage. Cheap to import: the object store's library and pyarrow are imported on first use."""

from cepheid_tiered.segment import (
    DamagedSegmentError,
    NoSuchSegmentError,
    SegmentError,
    SegmentNotWrittenError,
    SegmentReader,
    SegmentStore,
    SegmentSummary,
)
from cepheid_tiered.store_location import StoreLocation, StoreLocationError

__all__ = [
    "DamagedSegmentError",
    "NoSuchSegmentError",
    "SegmentError",
    "SegmentNotWrittenError",
    "SegmentReader",
    "SegmentStore",
    "SegmentSummary",
    "StoreLocation",
    "StoreLocationError",
]
