"""The document of `launch --json`."""

from __future__ import annotations

import msgspec

from multinode.profile.bottleneck import Bottleneck
from multinode.profile.figures import Straggler
from multinode.profile.summary import Summary
from multinode.records.plan import CodeCopy
from multinode.records.run import Attempt, EarlyVerdict, Failure, NodeRun, Run, Stall
from multinode.stats.estimate import Spread


class LaunchDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The document of `launch --json`; `Summary` explains the figures."""

    schema: str = "multinode.launch/1"
    run_id: str
    status: str
    job: str
    engine: str
    world_size: int
    nodes: tuple[NodeRun, ...]
    first_failure: Failure | None
    samples_per_s: float | None
    step_time_ms: Spread | None
    steps: int
    steady_steps: int
    rule: str
    trainer_samples_per_s: float | None
    all_steps_samples_per_s: float | None
    first_loss: float | None
    last_loss: float | None
    strategy: str
    bottleneck: Bottleneck | None
    stragglers: tuple[Straggler, ...]
    missing: dict[str, str]
    duration_s: float | None
    stalls: tuple[Stall, ...]
    attempts: tuple[Attempt, ...]
    stop_reason: str
    early_verdict: EarlyVerdict | None
    code: CodeCopy | None
    directory: str


_FIELDS = {name for name in LaunchDocument.__struct_fields__ if name != "schema"}
_OF_RUN = _FIELDS & {*Run.__struct_fields__}
_OF_SUMMARY = _FIELDS & {*Summary.__struct_fields__} - _OF_RUN


def launch_document(
    run: Run,
    summary: Summary,
    directory: str,
    early_verdict: EarlyVerdict | None = None,
    code: CodeCopy | None = None,
) -> LaunchDocument:
    """The document."""
    return LaunchDocument(
        **{name: getattr(run, name) for name in _OF_RUN},
        **{name: getattr(summary, name) for name in _OF_SUMMARY},
        duration_s=run.ended_s - run.started_s if run.ended_s is not None else None,
        early_verdict=early_verdict,
        code=code,
        directory=directory,
    )
