from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from multinode.cli.main import build_app
from multinode.errors import UsageError


@pytest.mark.parametrize("rate", ["0", "1bit", "1000tbit", "nan", "fast"])
@pytest.mark.parametrize("option", ["--link", "--link-measured"])
def test_a_link_that_cannot_be_is_refused(option: str, rate: str) -> None:
    result = CliRunner().invoke(build_app(), ["advise", option, rate])
    assert isinstance(result.exception, UsageError)
    assert result.exception.message.startswith(option)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--repeats", "2"], "--repeats is for trying"),
        (["--set", "max_steps=3"], "--set is for trying"),
        (["--hosts", "lab"], "--hosts is for trying"),
        (["--", "train.py"], "a script is for trying"),
    ],
)
def test_what_only_a_try_needs_is_not_ignored_without_one(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MULTINODE_RUNS", str(tmp_path))
    result = CliRunner().invoke(build_app(), ["advise", *arguments])
    assert isinstance(result.exception, UsageError)
    assert result.exception.message.startswith(said)
    assert result.exception.hint == "add --try N"
