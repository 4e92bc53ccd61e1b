from __future__ import annotations

from pathlib import Path

import pytest

from multinode.errors import UsageError
from multinode.records.files import read_text, require_directory, write_text


def complaint(path: Path, hint: str = "see hostfiles/") -> UsageError:
    with pytest.raises(UsageError) as caught:
        read_text(path, "the hostfile", "see hostfiles/")
    assert caught.value.hint == hint
    assert "\n" not in str(caught.value)
    return caught.value


def test_the_text_comes_back_verbatim(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_bytes("caf\N{LATIN SMALL LETTER E WITH ACUTE}\n".encode())
    assert read_text(path, "the hostfile") == "caf\N{LATIN SMALL LETTER E WITH ACUTE}\n"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert str(complaint(tmp_path / "gone")) == f"the hostfile {tmp_path}/gone does not exist"


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    assert str(complaint(tmp_path)) == f"the hostfile {tmp_path} cannot be read: Is a directory"


def test_a_file_inside_a_file_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be read: Not a directory" in str(complaint(tmp_path / "file" / "hosts.txt"))


def test_bytes_that_are_no_text_are_not_guessed_at(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_bytes(b"caf\xe9")
    assert str(complaint(path, "save it as UTF-8")) == f"the hostfile {path} is not UTF-8 text"


def test_a_model_given_as_a_hostfile_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert "is too large" in str(complaint(path))


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000])
def test_what_cannot_be_a_path_is_an_error_like_any_other(tmp_path: Path, name: str) -> None:
    told = str(complaint(tmp_path / name))
    assert "is not a valid path" in told or "cannot be read: File name too long" in told


def test_output_replaces_that_of_an_earlier_time(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_text(path, "old")
    write_text(path, "new")
    assert path.read_text() == "new"


def test_output_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written: Is a directory"):
        write_text(tmp_path, "text")
    require_directory(tmp_path)
    with pytest.raises(UsageError, match="is not a directory") as caught:
        require_directory(tmp_path / "not there")
    assert caught.value.hint == f"mkdir -p '{tmp_path}/not there'"
