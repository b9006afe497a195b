"""Programs that run Cepheid on real data and check what they promise (README.md)."""
