"""The storage node: journal, write cache, entry log, block index; served in-process or over a network."""

from cepheid_bookie.block_index import BlockIndex, BlockRef
from cepheid_bookie.bookie import Bookie, BookieState
from cepheid_bookie.cookie import BookieIdentity, Cookie, CookieRecords
from cepheid_bookie.disk import Disk, DiskFile, RealDisk
from cepheid_bookie.garbage_collection import GarbageCollector, LedgersInMetadata
from cepheid_bookie.metadata_records import MetadataCookies, MetadataDamage, MetadataLedgers
from cepheid_bookie.settings import StorageSettings
from cepheid_bookie.statistics import BookieStatistics

__all__ = [
    "BlockIndex",
    "BlockRef",
    "Bookie",
    "BookieIdentity",
    "BookieState",
    "BookieStatistics",
    "Cookie",
    "CookieRecords",
    "Disk",
    "DiskFile",
    "GarbageCollector",
    "LedgersInMetadata",
    "MetadataCookies",
    "MetadataDamage",
    "MetadataLedgers",
    "RealDisk",
    "StorageSettings",
]
