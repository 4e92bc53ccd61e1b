from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from multinode.cli.main import build_app
from multinode.errors import UsageError


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_samples_are_copied_and_what_the_hint_says_works() -> None:
    copied = CliRunner().invoke(build_app(), ["init", "--example"])
    assert copied.exit_code == 0
    assert {"configs/default.yaml", "hostfiles/two4090.txt", "scripts/make_tiny.py"} <= {*copied.stdout.split()}
    assert [name for name in copied.stdout.split() if not Path(name).is_file()] == []
    following = copied.stderr.removeprefix("Next        multinode ").split()
    assert CliRunner().invoke(build_app(), following).exit_code == 0


@pytest.mark.parametrize("there", ["hostfiles", "configs", "scripts/make_tiny.py"])
def test_what_is_there_already_is_left_alone(there: str) -> None:
    Path(there).mkdir(parents=True)
    refused = CliRunner().invoke(build_app(), ["init", "--example"]).exception
    assert isinstance(refused, UsageError)
    assert (refused.message, refused.hint) == (f"{there} already exists", "choose another directory: -o DIR")
    assert [path for path in Path().rglob("*") if path.is_file()] == []
    elsewhere = CliRunner().invoke(build_app(), ["init", "--example", "-o", "my dir"])
    assert Path("my dir/configs/default.yaml").is_file()
    assert elsewhere.stderr.startswith("Next        cd 'my dir' && multinode launch ")


def test_a_directory_that_cannot_be_written_is_told() -> None:
    Path("file").touch()
    refused = CliRunner().invoke(build_app(), ["init", "--example", "-o", "file/below"]).exception
    assert isinstance(refused, UsageError)
    assert refused.message == "file/below cannot be written: Not a directory"


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "no node was given"), (["gpu-a", "--example"], "--example does not probe nodes, but nodes were given")],
)
def test_either_nodes_are_named_or_the_samples_are_wanted(words: list[str], message: str) -> None:
    refused = CliRunner().invoke(build_app(), ["init", *words]).exception
    assert isinstance(refused, UsageError)
    assert (refused.message, "multinode init --example" in (refused.hint or "")) == (message, True)
