"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# No deadline for a single example: on a busy machine the first one, which warms caches, would fail by the clock alone.
settings.register_profile("megarl", deadline=None)
settings.load_profile("megarl")
