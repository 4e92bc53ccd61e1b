"""load_imported_table: a CSV or YAML of figures measured elsewhere, as `multinode import` takes it."""

from __future__ import annotations

from pathlib import Path

from multinode.core.grid.imported_table import FORMS, HINT, Extras, ImportedTable, parse_table
from multinode.errors import UsageError
from multinode.store.text_file import read_text

__all__ = ["load_imported_table"]


def load_imported_table(path: Path, extras: Extras) -> tuple[ImportedTable, bytes]:
    """The table, and the file's bytes as they are.

    Args:
        path: of the file; its ending tells the form.
        extras: what holds for all rows.

    Raises:
        UsageError: it cannot be read, or a line of it is wrong; the message has its place.
    """
    if path.suffix.lower() not in FORMS:
        raise UsageError(f"{path} is neither CSV nor YAML by its name: expected {', '.join(FORMS)}", hint=HINT)
    return parse_table(read_text(path, "the table", HINT), str(path), extras), path.read_bytes()
