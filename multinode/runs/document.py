"""RunDocument: a run as JSON, the same whichever command prints it."""

from __future__ import annotations

from typing import Any

from multinode.profile.summary import Summary
from multinode.records.plan import CodeCopy
from multinode.records.run import EarlyVerdict, Run


class RunDocument(Run, frozen=True, kw_only=True):
    """The document of `launch`, `attach`, `stop` and `show`: the record of the run, and its results."""

    schema: str = "multinode.launch/2"
    directory: str
    code: CodeCopy | None = None  # the copied code that it ran in; None without --code
    summary: Summary | None = None  # its figures; None if it ended too early, or launched nothing itself
    early_verdict: EarlyVerdict | None = None
    # results of other verbs, each as its own verb prints it
    contrast: dict[str, Any] | None = None
    nccl_test: dict[str, Any] | None = None
    sweep: dict[str, Any] | None = None
    bench: dict[str, Any] | None = None
    tune: dict[str, Any] | None = None  # of `nccl-test --tune`
    tuning: dict[str, Any] | None = None  # of `tune`
