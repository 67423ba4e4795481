"""Environments that come with megarl: small, complete, and examples for one's own."""
