"""Grading responses, in worker processes with deadlines."""
