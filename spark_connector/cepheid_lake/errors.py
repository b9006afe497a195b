"""Errors of exports, besides those of reading a topic (ScanError)."""

from __future__ import annotations

from cepheid_ports import CepheidError


class LakeError(CepheidError):
    """An export cannot continue. What was committed before stays in the table."""


class LakeTargetError(LakeError):
    """The table cannot be written or read, or is not as this export left it."""


class ConcurrentExportError(LakeTargetError):
    """Another export committed to the table during this one."""

    retriable = True
    hint = "run one export for each table at a time; running this one again continues where the table ends"
