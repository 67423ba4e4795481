"""rollout.servers: a number of servers to start, or where those are that somebody else started."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.recipe.load import load_recipe
from megarl.recipe.sampling_rules import check_beside
from megarl.recipe.schema import Recipe
from megarl.recipe.servers import ExternalServers
from megarl.recipe.source import dump_yaml

TWO = "rollout.servers={urls: ['http://Host-a:30000/', 'http://10.0.0.2:30000'], key_env: SERVERS_KEY}"
STALE = "rollout.max_staleness=1"


def loaded(file: Path, *overrides: str) -> Recipe:
    return load_recipe(file, overrides, Recipe).recipe


def test_a_number_is_servers_on_devices_of_the_run(recipe_file: Path) -> None:
    rollout = loaded(recipe_file, "rollout.servers=3", "rollout.tp=2").rollout
    assert (rollout.servers, rollout.external, rollout.num_servers, rollout.server_devices) == (3, None, 3, 6)


def test_a_section_is_servers_of_somebody_else(recipe_file: Path, tmp_path: Path) -> None:
    first = load_recipe(recipe_file, [TWO, STALE, "rollout.collectors=2"], Recipe)
    rollout = first.recipe.rollout
    external = ExternalServers(urls=("http://host-a:30000", "http://10.0.0.2:30000"), key_env="SERVERS_KEY")
    assert (rollout.external, rollout.num_servers, rollout.server_devices) == (external, 2, 0)
    check_beside(first.recipe, beside=True)
    # What whoever starts the servers says is not in the recipe that a run keeps, and that one loads to the same.
    assert {"tp", "kv_tokens", "max_running_requests", "server_args", "offload"}.isdisjoint(first.resolved["rollout"])
    again = tmp_path / "again.yaml"
    again.write_text(dump_yaml(first.resolved))
    assert loaded(again) == first.recipe
    assert loaded(again, "rollout.servers=2").rollout.servers == 2
    assert loaded(again, "rollout.servers.key_env=null").rollout.external == ExternalServers(urls=external.urls)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rollout.servers=0"], "allowed: a whole number over 0 or a section with the keys urls, key_env"),
        (["rollout.servers=many"], 'got "many" (text); allowed: a whole number over 0 or a section'),
        (["rollout.servers=true"], "got true"),
        (["rollout.servers={key_env: K}"], "`rollout.servers.urls` is missing"),
        (["rollout.servers={url: ['http://a:1']}"], "Did you mean `rollout.servers.urls`?"),
        (["rollout.servers.urls=[]"], "`rollout.servers.urls` (on the command line): the list is empty"),
        (["rollout.servers.urls='http://a:1'"], "allowed: a list of text"),
        (
            ["rollout.servers.urls=[http://a:1, 10.0.0.2:30000]"],
            "`rollout.servers.urls.1` (on the command line): wanted is",
        ),
        (["rollout.servers.urls=[http://a:1/v1]"], "without a path behind it"),
        (["rollout.servers.urls=[http://user:secret@a:1]"], "name it in key_env"),
        (["rollout.servers.urls=[http://a:1, http://A:1/]"], "http://a:1 is named more than once"),
        (["rollout.servers.urls=[http://a:80, 'http://a:']"], "http://a is named more than once"),
        (["rollout.servers.urls=[http://a:1, http://a:0001]"], "http://a:1 is named more than once"),
        (["rollout.servers.urls=['http://a:1?']"], "`?` or `#` is refused"),
        (["rollout.servers.urls=['http://a:1#']"], "`?` or `#` is refused"),
        (["rollout.servers.urls=[http://a..b:1]"], "`rollout.servers.urls.0` (on the command line): wanted is"),
        ([f"rollout.servers.urls=[http://{'a' * 64}:1]"], "`rollout.servers.urls.0` (on the command line): wanted is"),
        ([TWO, "rollout.servers.key_env=sk-secret"], "the key itself belongs in no recipe"),
        ([TWO, "rollout.collectors=3"], "3 processes for 2 servers"),
        ([TWO, "rollout.tp=2"], "`rollout.tp` (on the command line) is read by nothing in this configuration"),
        (
            [TWO, "rollout.kv_tokens=4096"],
            "say it by the flags that they are started with (docs/rollout.md), or remove",
        ),
        ([TWO, "rollout.max_running_requests=8"], "say it by the flags"),
        ([TWO, "rollout.server_args=[--log-level, info]"], "say it by the flags"),
        ([TWO, "rollout.offload=[kv_cache]"], "say it by the flags"),
        ([TWO, "rollout.deterministic=true"], "not the run's to say. Set it to false, or rollout.servers to a number"),
        ([TWO, "placement.name=auto"], "placement.name decides it: remove that one to place the run by hand"),
    ],
)
def test_what_cannot_be_is_refused_without_a_secret(recipe_file: Path, overrides: list[str], says: str) -> None:
    with pytest.raises(UserError) as caught:
        loaded(recipe_file, *overrides)
    text = str(caught.value)
    assert says in text and "secret" not in text and caught.value.exit_code == 2
    assert "a value" not in text and "a section`" not in text
    assert len([line for line in text.splitlines() if line.startswith("  - ")]) in (0, 2)
