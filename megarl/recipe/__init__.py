"""Reads, resolves and refuses recipes. No torch."""
