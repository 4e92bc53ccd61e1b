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
    """A run and all that is known of it."""

    run: Run
    summary: Summary | None = None  # its figures; None where it never got so far
    observed: Observed | None = None  # its samples; None where it has no nodes of its own, as a contrast
    scan: ScanReport | None = None  # what an nccl-test measured; None of any other run
    contrast: Contrast | None = None  # what a contrast found; None of any other run
    cells: CellTable | None = None  # the table of a sweep or an import; None of any other run
    bench: BenchReport | None = None  # what a bench found out; None of any other run
    unread: str = ""  # what of it cannot be shown, and why, in a sentence; else empty

    @property
    def has_result(self) -> bool:
        """Whether there is something to show beside samples, or a word on why there is not."""
        return bool(self.unread) or any(
            found is not None for found in (self.scan, self.contrast, self.cells, self.bench)
        )
