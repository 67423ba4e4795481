"""What every actor process of a run does first, in a process that it may change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FIRST = """
import os, resource, shutil, sys
from pathlib import Path
from megarl.cluster.process import ProcessSpec, configure_process
told = os.dup(sys.stdout.fileno())
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
configure_process(ProcessSpec("router", Path("logs")))
lines = [shutil.which("program-of-a-package"), os.environ["PATH"], resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256]
os.write(told, "\\n".join(map(str, lines)).encode())
"""


def test_programs_beside_its_python_are_found_and_many_files_may_be_open(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "program-of-a-package").touch(mode=0o755)
    python = tmp_path / "bin" / "python"
    words = FIRST.replace("told =", f"sys.executable = {str(python)!r}\ntold =")
    # Packages may be in a folder that is on the path alone.
    packages = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    for path, then in (
        ("/usr/bin", f"{python.parent}:/usr/bin"),
        (f"/usr/bin:{python.parent}", f"/usr/bin:{python.parent}"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", words],
            cwd=tmp_path,
            env={"PATH": path, "PYTHONPATH": os.pathsep.join(packages)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.splitlines() == [str(python.parent / "program-of-a-package"), then, "True"]
