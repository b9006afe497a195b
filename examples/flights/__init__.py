"""`cepheid demo`: publish and consume flights through two crashes of the server (README.md)."""
