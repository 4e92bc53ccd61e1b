"""How the table of a sweep is shown at its end; what cannot be shown so is refused before anything is measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import typer

if TYPE_CHECKING:
    from multinode.workflows.grid.sweep_cell import AskedGrid

__all__ = ["TableLook"]


class TableLook(NamedTuple):
    """What the command line asks of the table; each is as `multinode table` has it."""

    sort: str | None = None
    where: list[str] | None = None
    baseline: str | None = None
    prices: Path | None = None
    deadline: str | None = None
    form: Literal["table", "markdown", "csv"] = "table"

    def require_fit(self, asked: AskedGrid, *, as_json: bool) -> None:
        """See that the table can be shown so, with the cells as they are before any of them is measured.

        Raises:
            UsageError: it cannot.
        """
        from multinode.analyse.grid.cell_view import Look
        from multinode.analyse.grid.cells import CellRow, CellTable
        from multinode.cli.inputs import parse_option
        from multinode.errors import UsageError
        from multinode.store.prices import load_prices
        from multinode.units import parse_duration
        from multinode.workflows.grid.sweep_table import View, show

        if as_json and self.form != "table":
            raise UsageError(f"--format {self.form} and --json both print on stdout", hint="give one of them")
        view = View(
            look=Look(baseline=None, sort=self.sort, where=tuple(self.where or ())),
            prices=load_prices(self.prices)[0] if self.prices is not None else None,
            deadline_s=parse_option("--deadline", self.deadline, parse_duration) if self.deadline else None,
        )
        rows = tuple(CellRow(label=cell.label, state="waiting", varied=cell.settings) for cell in asked.cells)
        show(CellTable(run_id="", job="", cells=rows), view)
        labels = [cell.label for cell in asked.cells]
        if self.baseline is not None and self.baseline not in labels:
            raise UsageError(f"--baseline {self.baseline}: there is no such cell", hint=f"one of {', '.join(labels)}")

    def show(self, run_id: str, *, as_json: bool) -> None:
        """The table of a sweep that was stored, on stdout; beside another baseline where the one has no speed."""
        from multinode.errors import UsageError

        try:
            self._show(run_id, self.baseline, as_json=as_json)
        except UsageError as error:
            if self.baseline is None:
                raise
            typer.echo(f"warning: --baseline: {error.message}; the first row that has a speed is taken", err=True)
            self._show(run_id, None, as_json=as_json)

    def _show(self, run_id: str, baseline: str | None, *, as_json: bool) -> None:
        from multinode.cli.table import table

        table(
            [run_id],
            sort=self.sort,
            where=self.where,
            baseline=baseline,
            prices=self.prices,
            deadline=self.deadline,
            form=None if as_json else self.form,
            output=None,
            as_json=as_json,
        )
