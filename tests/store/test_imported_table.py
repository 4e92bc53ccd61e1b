from __future__ import annotations

from pathlib import Path

import pytest

from multinode.core.grid.imported_table import Extras
from multinode.errors import UsageError
from multinode.workflows.grid.import_table import load_imported_table

CSV = b"\xef\xbb\xbfgpus;samples/s\r\n2;1.5\r\n"
YAML = b"- {gpus: 2, samples/s: 1.5}\n"


@pytest.mark.parametrize(
    ("name", "data"),
    [("a.csv", CSV), ("a.CSV", CSV), ("a.tsv", CSV.replace(b";", b"\t")), ("a.yaml", YAML), ("a.yml", YAML)],
)
def test_the_ending_tells_the_form_and_the_bytes_are_kept_as_they_are(tmp_path: Path, name: str, data: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    table, kept = load_imported_table(path, Extras())
    assert [row.figures["world_size"].value for row in table.rows] == [2]
    assert kept == data


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.xlsx", b"", "a.xlsx is neither CSV nor YAML by its name: expected .csv, .tsv, .yaml, .yml"),
        ("a", CSV, "is neither CSV nor YAML by its name"),
        ("a.csv", None, "does not exist"),
        ("a.csv", "gpus\n1\n".encode("utf-16"), "is not text in UTF-8"),
        ("a.csv", b"gpus\n0\n", "a.csv:2: gpus: '0': expected a whole number"),
        ("a.yaml", b"gpus: 1", "a.yaml:1: unknown key 'gpus'"),
    ],
)
def test_a_file_that_cannot_be_taken_says_why(tmp_path: Path, name: str, data: bytes | None, said: str) -> None:
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(UsageError) as refused:
        load_imported_table(path, Extras())
    assert said in refused.value.message
    assert refused.value.hint
