"""Lets Spark find the format "cepheid". Imported whenever Spark looks up any source: it must be tiny and never fail."""

try:
    from cepheid_spark.source import CepheidDataSource as DefaultSource
except ImportError:  # a Spark without Python sources: it does not look here, but other code that imports this module may
    pass
else:
    __all__ = ["DefaultSource"]
