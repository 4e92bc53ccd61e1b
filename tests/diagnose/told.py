"""What a failure tells its reader, as a finding: for golden files."""

from __future__ import annotations

from multinode.diagnose.explanation import LogFailure
from multinode.findings.finding import Finding
from multinode.records.run import Failure


def told_of(failure: Failure | LogFailure | None) -> Finding:
    """Its kind and error, where it happened, its message and its cause, and its hint."""
    if failure is None:
        return Finding(message="no failure")
    code = ", ".join(filter(None, (failure.kind, failure.error_id)))
    where = ", ".join(
        filter(None, (failure.node, "" if failure.rank is None else f"rank {failure.rank}")),
    )
    words = "\n".join(filter(None, (failure.message, failure.cause)))
    return Finding(code=code, node=where, message=words, hint=failure.hint)
