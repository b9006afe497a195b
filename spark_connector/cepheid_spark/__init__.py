"""Spark's data source `cepheid`: batch and structured streaming over the history of topics, past the brokers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cepheid_spark.doctor import Finding, doctor
from cepheid_spark.java_check import NoJavaError, find_java
from cepheid_spark.versions import UnsupportedSparkError, require_spark

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
    "require_spark",
]


def __getattr__(name: str) -> Any:
    """On first use: Spark imports this package to look up sources, and these need more of it than that."""
    if name == "ProgressListener":
        from cepheid_spark.progress_listener import ProgressListener

        return ProgressListener
    if name == "register":
        from cepheid_spark.views import register

        return register
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
