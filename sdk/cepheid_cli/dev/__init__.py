"""`cepheid dev`: a cluster of processes on this machine, and failures to try out."""

from cepheid_cli.dev.commands import app

__all__ = ["app"]
