"""`python -m megarl` is the megarl command."""

from megarl.cli import entry

entry()
