from __future__ import annotations

from pathlib import Path

from multinode.records.files import read_text, require_directory, write_text
from tests.golden import Golden, error_of


def test_the_text_comes_back_verbatim(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_bytes("caf\N{LATIN SMALL LETTER E WITH ACUTE}\n".encode())
    assert read_text(path, "the hostfile") == "caf\N{LATIN SMALL LETTER E WITH ACUTE}\n"


def test_what_cannot_be_read_is_refused(tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "latin-1.txt").write_bytes(b"caf\xe9")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(1 << 40)
    paths = {
        "no such file": tmp_path / "gone",
        "a directory": tmp_path,
        "a file inside a file": tmp_path / "file" / "hosts.txt",
        "no UTF-8": tmp_path / "latin-1.txt",
        "a model": tmp_path / "model.safetensors",
        "a zero byte": tmp_path / "a\0b",
        "a long name": Path("x" * 300),
    }
    golden.check_errors(
        "refused_text",
        {case: error_of(read_text, path, "the hostfile", "see hostfiles/") for case, path in paths.items()},
        tmp_path,
    )


def test_output_replaces_that_of_an_earlier_time(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_text(path, "old")
    write_text(path, "new")
    assert path.read_text() == "new"


def test_what_cannot_be_written_is_refused(tmp_path: Path, golden: Golden) -> None:
    require_directory(tmp_path)
    (tmp_path / "my file").touch()
    golden.check_errors(
        "refused_output",
        {
            "a directory": error_of(write_text, tmp_path, "text"),
            "a file inside a file": error_of(write_text, tmp_path / "my file" / "page.html", "text"),
            "no directory": error_of(require_directory, tmp_path / "not there"),
        },
        tmp_path,
    )
