"""What can go wrong between a topic and its table, besides what reading a topic raises (ScanError)."""

from __future__ import annotations

from cepheid_ports import CepheidError


class LakeError(CepheidError):
    """An export cannot go on. What was committed before stays in the table."""


class LakeTargetError(LakeError):
    """The table cannot be written or read, or is not what this export left there."""


class ConcurrentExportError(LakeTargetError):
    """Another export committed to the table while this one was at work."""

    retriable = True
    hint = "run one export for each table at a time; running this one again goes on where the table stands"
