"""Begins a Python process of a run's own Ray: `ray_process.py [FILE] ...`. FILE: Ray's, of an agent; without one it is a worker.

Run as a file. What Ray loads in each of its processes takes a third less time without looking for garbage in it, and without
two libraries that none of these asks for anything: jsonschema is for the driver's settings, requests for the driver's search for
devices. Who imports them later gets them. An agent finds no modules of the dashboard's: it would load all, and use none.
"""

from __future__ import annotations

import gc
import runpy
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
UNASKED = ("jsonschema", "requests")
DASHBOARD = "ray.dashboard.optional_deps"  # by which Ray finds out whether what a dashboard needs is installed


def load_ray() -> Path:
    """Ray, in this process; the folder that it is in."""
    sys.path[0] = str(ROOT)  # in the place of this file's folder
    from megarl.core.stand_in import standing_in

    del sys.path[0]
    gc.disable()
    with standing_in(UNASKED):
        import ray
        import ray._common.usage.usage_lib
        import ray._private.node
    gc.freeze()
    gc.enable()
    return Path(ray.__file__).parent


def without_dashboard() -> None:
    """Nothing of it is found in this process, and nothing looked for."""
    import ray.dashboard

    modules = ModuleType("ray.dashboard.modules")
    modules.__path__ = []
    ray.dashboard.modules = sys.modules[modules.__name__] = modules
    sys.modules[DASHBOARD] = None  # type: ignore[assignment]  # how Python writes down that there is none


def main() -> None:
    """Become what the command line says."""
    ray = load_ray()
    if len(sys.argv) > 1 and sys.argv[1].endswith(".py"):
        del sys.argv[0]
        without_dashboard()
    else:
        sys.argv[0] = str(ray / "_private" / "workers" / "default_worker.py")
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
