"""The required version of Spark. Older ones have no admission control for Python sources: no rate limit, no proper AvailableNow."""

from __future__ import annotations

from cepheid_ports import CepheidError

LEAST_SPARK = (4, 2)


class UnsupportedSparkError(CepheidError):
    """This Spark cannot run the source."""

    hint = "pip install 'pyspark>=4.2', on the cluster too"


def require_spark() -> None:
    """Raise UnsupportedSparkError for an old Spark.

    Called where Spark's driver runs the source: over Connect that is the server.
    """
    import pyspark

    if not is_enough(pyspark.__version__):
        raise UnsupportedSparkError(f"format 'cepheid' needs Spark 4.2 or newer; this is Spark {pyspark.__version__}")


def is_enough(version: str) -> bool:
    numbers = version.split(".")
    return all(part.isdigit() for part in numbers[:2]) and tuple(int(part) for part in numbers[:2]) >= LEAST_SPARK
