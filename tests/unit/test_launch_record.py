"""What is recorded about who ran what, where the system knows little."""

import getpass
import os

import pytest

from launch import record


@pytest.mark.parametrize("error", [KeyError("uid not found"), OSError("No username set")])
def test_a_user_without_a_name_is_recorded_by_number(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nameless() -> str:
        raise error

    monkeypatch.setattr(getpass, "getuser", nameless)
    assert record.environment(["make"])["user"] == str(os.getuid())


def test_a_user_is_recorded_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    assert record.environment(["make"])["user"] == "ada"
