"""The command line. Exit codes: 0 ok, 1 a cell or an arm failed, 2 bad input, 3 not certified."""

from harness.cli.app import main

__all__ = ["main"]
