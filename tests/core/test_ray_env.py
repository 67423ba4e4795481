"""Which Ray a run joins, and what Ray itself puts into the environment of a job's command."""

from __future__ import annotations

import json

import pytest

from megarl.core.errors import UserError
from megarl.core.ray_env import (
    JOB_ADDRESS_VARIABLE,
    JOB_VARIABLE,
    RAY_ADDRESS_VARIABLE,
    RunningRay,
    is_for_driver_alone,
    ray_to_join,
)

IN_A_JOB = {JOB_VARIABLE: "{}", JOB_ADDRESS_VARIABLE: "10.0.0.2:6379"}
NAMED = {RAY_ADDRESS_VARIABLE: "10.0.0.1:26000"}


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (RAY_ADDRESS_VARIABLE, JOB_VARIABLE, JOB_ADDRESS_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_the_names_are_rays_own() -> None:
    from ray._private.ray_constants import RAY_ADDRESS_ENVIRONMENT_VARIABLE
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

    assert (JOB_VARIABLE, JOB_ADDRESS_VARIABLE) == (RAY_JOB_CONFIG_JSON_ENV_VAR, RAY_ADDRESS_ENVIRONMENT_VARIABLE)


@pytest.mark.parametrize(
    ("env", "joined"),
    [
        ({}, None),
        (NAMED, RunningRay("10.0.0.1:26000", RAY_ADDRESS_VARIABLE)),
        (IN_A_JOB, RunningRay("10.0.0.2:6379", JOB_ADDRESS_VARIABLE)),
        ({**IN_A_JOB, **NAMED}, RunningRay("10.0.0.1:26000", RAY_ADDRESS_VARIABLE)),
        ({JOB_ADDRESS_VARIABLE: "10.0.0.2:6379"}, None),  # of somebody's shell: no word about this run
    ],
    ids=["alone", "named", "in a job", "another than the job's", "no job"],
)
def test_a_run_joins_the_ray_that_is_named_else_its_jobs(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], joined: RunningRay | None
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert ray_to_join() == joined


@pytest.mark.parametrize("job", [{}, IN_A_JOB], ids=["alone", "in a job"])
def test_an_empty_name_is_refused(monkeypatch: pytest.MonkeyPatch, job: dict[str, str]) -> None:
    """What becomes of MEGARL_RAY_ADDRESS=$VARIABLE where nobody has set that one."""
    for name, value in {**job, RAY_ADDRESS_VARIABLE: ""}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"MEGARL_RAY_ADDRESS is set, and empty: it has to be host:port.*Unset it"):
        ray_to_join()


@pytest.mark.parametrize(
    ("settings", "alone"),
    [
        ({}, True),
        ({"runtime_env": None}, True),
        ({"runtime_env": {"env_vars": None}}, True),
        ({"runtime_env": {"working_dir": "gcs://x", "env_vars": {"OTHER": "1"}}}, True),
        ({"runtime_env": {"env_vars": {"NAME": "1"}}}, False),
    ],
)
def test_what_a_jobs_workers_start_with_is_in_its_settings(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], alone: bool
) -> None:
    assert not is_for_driver_alone("NAME")
    monkeypatch.setenv(JOB_VARIABLE, json.dumps(settings))
    assert is_for_driver_alone("NAME") == alone
