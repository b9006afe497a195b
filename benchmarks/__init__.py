"""One command per question about speed; each prints one JSON line. See README.md."""
