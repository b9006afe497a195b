"""Spark's data source `cepheid`: batch and structured streaming over the history of topics, past the brokers."""
