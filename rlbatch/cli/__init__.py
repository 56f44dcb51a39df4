"""The `rlbatch` program."""

from rlbatch.cli.app import app, main

__all__ = ["app", "main"]
