"""`cepheid dev`: a cluster of processes on this machine, and everything that can happen to it."""

from cepheid_cli.dev.commands import app

__all__ = ["app"]
