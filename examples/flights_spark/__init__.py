"""`cepheid demo-spark`: query flights with Spark while a Spark driver and a bookie are killed (README.md)."""
