"""The key's way into the launchers."""

from __future__ import annotations

import io
import pickle

import pytest

from megarl.serving.launcher import Secret, read_api_key


def test_a_secret_does_not_show_itself_but_is_a_string() -> None:
    secret = Secret("abc")
    settings = {"api_key": secret}
    assert f"server_args={settings}" == "server_args={'api_key': '***'}"
    assert f"Bearer {secret}" == "Bearer abc"
    assert secret == "abc"


def test_a_secret_stays_one_in_spawned_processes() -> None:
    copy = pickle.loads(pickle.dumps(Secret("abc")))
    assert (repr(copy), str(copy)) == ("'***'", "abc")


def test_the_key_is_the_first_line_of_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\nmore\n"))
    assert str(read_api_key()) == "abc"


def test_a_launcher_without_a_key_says_what_it_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(SystemExit, match="expects an API key"):
        read_api_key()
