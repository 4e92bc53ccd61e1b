"""A run and all that is known of it, as a page or Markdown shows it."""

from __future__ import annotations

import msgspec

from multinode.bench.figures import BenchReport
from multinode.contrast.figures import Contrast
from multinode.experiment.cells import CellTable
from multinode.network.size_scan import ScanReport
from multinode.profile.observed import Observed
from multinode.profile.summary import Summary
from multinode.records.run import Run


class ReportedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run and all that is known of it.

    Attributes:
        summary: its figures; None where it never got so far.
        observed: its samples; None where it has no nodes of its own, as a contrast.
        scan: what an nccl-test measured; None of any other run.
        contrast: what a contrast found; None of any other run.
        cells: the table of a sweep or an import; None of any other run.
        bench: what a bench found out; None of any other run.
        unread: what of it cannot be shown, and why, in a sentence; else empty.
    """

    run: Run
    summary: Summary | None = None
    observed: Observed | None = None
    scan: ScanReport | None = None
    contrast: Contrast | None = None
    cells: CellTable | None = None
    bench: BenchReport | None = None
    unread: str = ""

    @property
    def has_result(self) -> bool:
        """Whether there is something to show beside samples, or a word on why there is not."""
        return bool(self.unread) or any(
            found is not None for found in (self.scan, self.contrast, self.cells, self.bench)
        )
