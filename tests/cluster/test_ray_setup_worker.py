"""A worker of a job's Ray has the job's variables, whichever way it begins."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from megarl.cluster import ray_setup_worker
from megarl.cluster.ray_setup_worker import worker_of

# As Ray's agent writes it (2.60).
CONTEXT = {"command_prefix": [], "py_executable": sys.executable, "override_worker_entrypoint": None, "java_jars": []}
WORKER = "import os, sys; print(os.environ['ASKED'], sys.argv[1:])"


def command_line(context: dict[str, object], language: str = "PYTHON") -> list[str]:
    """Ray's own words, in the midst of the worker's."""
    return [
        "-c",
        WORKER,
        f"--serialized-runtime-env-context={json.dumps(context)}",
        f"--language={language}",
        "--more=1",
    ]


@pytest.mark.parametrize(("value", "short"), [('it\'s 1 "word"', True), ("${HOME} and more", False)])
def test_the_worker_has_its_variables_and_the_words_that_are_its_own(value: str, short: bool) -> None:
    words = command_line({**CONTEXT, "env_vars": {"ASKED": value}})
    assert (worker_of(words) is not None) == short
    argv = [sys.executable, str(ray_setup_worker.__file__), *words]
    done = subprocess.run(argv, capture_output=True, text=True, env=os.environ | {"HOME": "here"}, check=True)
    assert done.stdout == f"{value.replace('${HOME}', 'here')} ['--more=1']\n"


@pytest.mark.parametrize(
    "asked",
    [
        {"command_prefix": ["numactl"]},
        {"py_executable": "/usr/bin/python0"},
        {"override_worker_entrypoint": "/worker.py"},
        {"java_jars": ["some.jar"]},
        {"what a later Ray may have": True},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_whatever_else_is_asked_for_is_rays_to_do(asked: dict[str, object]) -> None:
    assert worker_of(command_line({**CONTEXT, "env_vars": {}})) is not None
    assert worker_of(command_line({**CONTEXT, "env_vars": {}, **asked})) is None


def test_what_is_no_worker_of_pythons_is_rays_to_begin() -> None:
    assert worker_of(command_line(CONTEXT, "JAVA")) is None
    assert worker_of(["default_worker.py", "--language=PYTHON"]) is None
