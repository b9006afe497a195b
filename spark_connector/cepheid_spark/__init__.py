"""Spark's data source `cepheid`: batch and structured streaming over the history of topics, bypassing the brokers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cepheid_spark.doctor import Finding, doctor
from cepheid_spark.java_check import NoJavaError, find_java
from cepheid_spark.versions import UnsupportedSparkError

if TYPE_CHECKING:
    from cepheid_spark.progress_listener import ProgressListener
    from cepheid_spark.views import register

__all__ = [
    "Finding",
    "NoJavaError",
    "ProgressListener",
    "UnsupportedSparkError",
    "doctor",
    "find_java",
    "register",
]


_LAZY = {"ProgressListener": "progress_listener", "register": "views"}


def __getattr__(name: str) -> Any:
    """Import on first use: Spark imports this package to look up sources, and these need more modules."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
