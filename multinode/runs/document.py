"""RunDocument: a run as JSON, the same whichever command prints it."""

from __future__ import annotations

from typing import Any

import msgspec

from multinode.profile.summary import Summary
from multinode.records.plan import CodeCopy
from multinode.records.run import EarlyVerdict, Run

_Result = dict[str, Any] | None


class RunDocument(Run, frozen=True, kw_only=True):
    """The document of `launch`, `attach`, `stop` and `show`: the record of the run, and its results."""

    schema: str = "multinode.launch/2"
    directory: str
    code: CodeCopy | None = None  # the copied code that it ran in; None without --code
    summary: Summary | None = None  # its figures; None if it ended too early, or launched nothing itself
    early_verdict: EarlyVerdict | None = None
    # results of other verbs, each as its own verb prints it, from the file of its name
    contrast: _Result = None
    nccl_test: _Result = None
    sweep: _Result = None
    bench: _Result = None
    tune: _Result = None  # of `nccl-test --tune`
    tuning: _Result = None  # of `tune`


RESULTS = {
    field.name: f"{field.name.replace('_', '-')}.json"
    for field in msgspec.structs.fields(RunDocument)
    if field.type == _Result
}
"""The files of results beside a run's record and figures, by their key in its document."""
