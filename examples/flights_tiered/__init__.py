"""Tiered storage on real data: `cepheid demo-tiered`."""
