from __future__ import annotations

from pathlib import Path

import pytest

from multinode.cluster.prices import Price, Prices
from multinode.errors import UsageError
from multinode.runs.stored_run import load_run, load_runs
from multinode.stats.unknown import Unknown
from multinode.sweep.measure import load_tables
from multinode.sweep.table import Look
from multinode.tables.imported_rows import import_table
from multinode.tables.imported_table import Extras

FIGURES = Path(__file__).parents[2] / "configs" / "figures"
PRICES = "currency: EUR\ndevices:\n  A: {hourly: 2}\n"
TABLE = b"gpu,gpus,samples/s\r\nA,1,2.50\r\nB,2,5.00\r\n"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "mine.csv"
    path.write_bytes(TABLE)
    return path


def test_an_import_is_a_run_with_the_file_as_it_was(tmp_path: Path, table: Path) -> None:
    root = tmp_path / "runs"
    imported = import_table(root, table)
    assert (imported.directory / "imported.csv").read_bytes() == TABLE
    run = load_run(root, "last").run
    assert (run.kind, run.status, run.job, run.nodes) == ("import", "succeeded", "mine.csv", ())
    assert run.ended_s is not None
    assert imported.table.run_id == run.run_id


def test_its_table_comes_back_as_a_sweeps_does(tmp_path: Path, table: Path) -> None:
    root = tmp_path / "runs"
    imported = import_table(root, table, name="Mine")
    found = load_tables(root, ["last"])
    assert found == imported.table
    assert [row.source for row in found.cells] == ["imported", "imported"]
    assert (found.job, found.baseline) == ("Mine", "a-x1")
    assert [row.relative.value for row in found.cells if row.relative is not None] == [1.0, 2.0]


def test_two_imports_are_compared_in_one_table(tmp_path: Path, table: Path) -> None:
    root = tmp_path / "runs"
    names = [import_table(root, path).table.run_id for path in (table, FIGURES / "published_batches.csv")]
    found = load_tables(root, names, Look(baseline="V100_1gpu_8", sort="-samples_per_s"))
    assert len(found.cells) == 14
    assert found.cells[0].label == "A100_1gpu_8-fp16"
    assert found.cells[0].relative is not None
    assert found.cells[0].relative.value == pytest.approx(35.552 / 11.43)


def test_prices_and_defaults_reach_the_rows_and_are_kept(tmp_path: Path, table: Path) -> None:
    root, prices = tmp_path / "runs", tmp_path / "prices.yaml"
    prices.write_text(PRICES)
    extras = Extras(defaults={"samples": "9000", "epochs": "1"})
    imported = import_table(root, table, extras, prices_path=prices)
    first, second = imported.table.cells
    assert (first.price_per_hour, first.currency) == (2.0, "EUR")
    assert first.whole_cost == pytest.approx(2.0)  # 9000 samples at 2.5 a second are an hour
    assert isinstance(second.price_per_hour, Unknown)
    assert (imported.directory / "prices.yaml").read_text() == PRICES


def test_an_import_is_priced_anew_by_the_prices_of_the_day(tmp_path: Path, table: Path) -> None:
    root, prices = tmp_path / "runs", tmp_path / "prices.yaml"
    prices.write_text(PRICES)
    import_table(root, table, prices_path=prices)
    today = Prices(currency="USD", devices={"A": Price(hourly=3), "B": Price(hourly=1)})
    found = load_tables(root, ["last"], Look(prices=today))
    assert [(row.price_per_hour, row.currency) for row in found.cells] == [(3.0, "USD"), (2.0, "USD")]


@pytest.mark.parametrize("wrong", ["table", "prices"])
def test_what_is_wrong_leaves_no_run_behind(tmp_path: Path, table: Path, wrong: str) -> None:
    root, prices = tmp_path / "runs", tmp_path / "prices.yaml"
    prices.write_text(PRICES if wrong == "table" else "currency: EUR\ndevice: {}\n")
    if wrong == "table":
        table.write_text("gpus\nmany\n")
    with pytest.raises(UsageError):
        import_table(root, table, prices_path=prices)
    assert load_runs(root) == []


def test_what_was_passed_over_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("gpus,samples/s,loss\n1,2.5,0.1\n")
    imported = import_table(tmp_path / "runs", path, Extras(ignore=("loss",)))
    assert "Ignored columns: loss." in [note.message for note in imported.table.notes]


CSV = b"\xef\xbb\xbfgpus;samples/s\r\n2;1.5\r\n"
YAML = b"- {gpus: 2, samples/s: 1.5}\n"


@pytest.mark.parametrize(
    ("name", "data"),
    [("a.csv", CSV), ("a.CSV", CSV), ("a.tsv", CSV.replace(b";", b"\t")), ("a.yaml", YAML), ("a.yml", YAML)],
)
def test_the_ending_tells_the_form_and_the_bytes_are_kept_as_they_are(tmp_path: Path, name: str, data: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    imported = import_table(tmp_path / "runs", path)
    assert [row.world_size for row in imported.table.cells] == [2]
    assert (imported.directory / f"imported{path.suffix.lower()}").read_bytes() == data


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        (
            "a.xlsx",
            b"",
            "a.xlsx has an unknown file type: expected .csv, .tsv, .md, .markdown, .txt, .json, ",
        ),
        ("a", CSV, "has an unknown file type"),
        ("a.csv", None, "does not exist"),
        ("a.csv", "gpus\n1\n".encode("utf-16"), "is not UTF-8"),
        ("a.csv", b"gpus\n0\n", "a.csv:2: gpus: '0': expected a whole number"),
        ("a.yaml", b"gpus: 1", "a.yaml:1: unknown key 'gpus'"),
    ],
)
def test_a_file_that_cannot_be_taken_says_why(tmp_path: Path, name: str, data: bytes | None, said: str) -> None:
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(UsageError) as refused:
        import_table(tmp_path / "runs", path)
    assert said in refused.value.message
    assert refused.value.hint
