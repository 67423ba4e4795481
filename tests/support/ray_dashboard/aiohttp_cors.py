"""Stands in for aiohttp-cors on the path of a test's Ray: its dashboard, which serves the job API, asks for it on start.

It would add headers for browsers of other sites; nobody here is one.
"""

from __future__ import annotations

from typing import Any


class ResourceOptions:
    def __init__(self, **options: Any) -> None: ...


class CorsConfig:
    def add(self, route: Any) -> Any:
        return route


def setup(app: Any, *, defaults: Any = None) -> CorsConfig:
    return CorsConfig()
