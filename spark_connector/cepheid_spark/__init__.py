"""Spark's data source `cepheid`: batch and structured streaming over the history of topics, past the brokers."""

from cepheid_spark.doctor import Finding, doctor
from cepheid_spark.java_check import NoJavaError, find_java
from cepheid_spark.versions import UnsupportedSparkError, require_spark

__all__ = ["Finding", "NoJavaError", "UnsupportedSparkError", "doctor", "find_java", "require_spark"]
