"""Tables: all samples of a run as CSV or Parquet files, one per kind, as in `multinode report --format csv`."""

from __future__ import annotations

from pathlib import Path

from multinode.export.exporter import Exporter
from multinode.profile.export import csv_files, sample_tables
from multinode.records.files import write_text
from multinode.runs.stored_run import StoredRun


class CsvFiles(Exporter):
    """Files in DIR/RUN, once the run has ended."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def end(self, ended: StoredRun) -> None:
        """Write them."""
        folder = self._directory / ended.run.run_id
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in csv_files([ended.observed]).items():
            write_text(folder / name, text)


class ParquetFiles(Exporter):
    """Writes the tables of a run as Parquet files; columns without values have the type null."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def end(self, ended: StoredRun) -> None:
        """Write them."""
        import pyarrow as pa  # noqa: PLC0415 - an extra
        from pyarrow import parquet  # noqa: PLC0415

        folder = self._directory / ended.run.run_id
        folder.mkdir(parents=True, exist_ok=True)
        for name, (columns, rows) in sample_tables(ended.observed).items():
            records = list(rows)
            table = pa.table({column: [row.get(column) for row in records] for column in columns})
            parquet.write_table(table, folder / f"{name}.parquet")
