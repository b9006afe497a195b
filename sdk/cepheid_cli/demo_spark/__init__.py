"""`cepheid demo-spark`: history as DataFrames, while processes die. What it promises is judged by `checks`."""
