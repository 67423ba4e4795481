"""Whether a run has the devices that it asks for, and an environment in which these work."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

from megarl.core.errors import UserError
from megarl.core.platform import Platform, get_platform, num_local_devices
from megarl.core.ray_env import is_for_driver_alone, ray_to_join
from megarl.recipe.sampling_rules import check_beside
from megarl.recipe.schema import AnyRecipe, Recipe

LOOPBACK = "127.0.0.1"
CONNECT_S = 10.0
LONGEST_SOCKET = 107  # bytes of a socket's path
# Ray's longest, below the folder that it is given.
SOCKET = f"session_2026-01-01_00-00-00_000000_{os.getpid()}/sockets/plasma_store"


def check_devices(recipe: AnyRecipe, *, here: bool = True) -> Platform:
    """The platform, if it has the devices that the recipe asks for, and nothing here that breaks it. Raises UserError.

    here: off where the devices are other machines', as they are for a run that joins a Ray which runs.
    """
    platform = get_platform(recipe.cluster.platform)
    there = _local_devices(platform, here=here)
    wanted = recipe.cluster.devices
    if there is not None and there < wanted:
        fewer = f"Set it to at most {there}, make more visible," if there else "Make some visible,"
        raise UserError(
            f"cluster.devices is {wanted}, and this machine shows {there or 'no'} {platform.name} devices. "
            f"{fewer} or set cluster.platform to cpu."
        )
    _check_environment(platform)
    _check_working_directory()
    if here and ray_to_join() is None:
        _check_temporary()
        _check_loopback()
    return platform


def _check_working_directory() -> None:
    """Ray tells all processes where they are, as text. Raises UserError."""
    folder = os.getcwd()
    try:
        folder.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"The folder that megarl is called in, {folder!a}, has a name that is not UTF-8, and Ray starts nothing there. "
            "Rename it, or call megarl in another."
        ) from None


def _check_temporary() -> None:
    """Whether Ray's sockets find room where core/scratch has them: above what is now the temporary folder. Raises UserError."""
    scratch = Path(tempfile.gettempdir()).parent
    if not str(scratch).isascii():
        raise UserError(
            f"The temporary folder {scratch.parent} has letters in its path that are not ASCII, and Ray starts nothing there. "
            "Set TMPDIR to another, such as /tmp."
        )
    if (over := len(os.fsencode(scratch / SOCKET)) - LONGEST_SOCKET) > 0:
        raise UserError(
            f"The temporary folder {scratch.parent} has too long a path, by {over} characters: Ray puts sockets below it, whose "
            f"paths have at most {LONGEST_SOCKET}. Set TMPDIR to a shorter one, such as /tmp."
        )


def _check_loopback() -> None:
    """Whether processes of this machine reach each other where Ray and servers listen. Raises UserError."""
    try:
        with socket.create_server((LOOPBACK, 0)) as listener:
            socket.create_connection(listener.getsockname(), timeout=CONNECT_S).close()
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error
        raise UserError(
            f"Processes of this machine do not reach each other at {LOOPBACK} ({why}), where those of a run "
            "listen. Bring its loopback interface up, with its IPv4 address: `ip link set lo up`, `ip address add 127.0.0.1/8 "
            "dev lo`."
        ) from error


def _check_environment(platform: Platform) -> None:
    """Whether a variable of this environment, which all processes of a run inherit, breaks the platform. Raises UserError."""
    for conflict in platform.conflicts:
        if conflict.of_ray and is_for_driver_alone(conflict.variable):
            continue
        value = os.environ.get(conflict.variable, "").replace(" ", "")  # torch reads it with spaces as well
        if conflict.word.lower() in value.lower():
            raise UserError(
                f"The environment has {conflict.variable}={os.environ[conflict.variable]}, and {conflict.why}. Unset it."
            )


def _local_devices(platform: Platform, *, here: bool) -> int | None:
    """This machine's, where they are all that the run has; None where nobody knows yet."""
    return num_local_devices(platform) if here and ray_to_join() is None else None


def check_room_beside(recipe: Recipe, platform: Platform, *, here: bool) -> None:
    """Devices for ranks and servers, where both work at once. Raises UserError."""
    there, servers = _local_devices(platform, here=here), recipe.rollout.server_devices
    few = there is not None and platform.has_device_memory and there < recipe.cluster.devices + servers
    check_beside(recipe, beside=not few)
