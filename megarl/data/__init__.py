"""Rows on disk to prompts, and samples to packed micro-batches."""
