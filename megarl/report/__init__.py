"""Metrics for people: console, files, pictures."""
