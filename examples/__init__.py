"""Programs that run Cepheid on real data and check its promises (README.md)."""
