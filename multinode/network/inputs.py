"""What `nccl-test` was asked for, and the launch that it makes. Contacts no node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from multinode.decoding import parse_option
from multinode.errors import UsageError
from multinode.job.deepspeed import parse_deepspeed_edits
from multinode.job.job_files import load_job
from multinode.launch.context import ExecuteOptions, Launch, Nodes
from multinode.launch.inputs import (
    Count,
    NodeInput,
    Note,
    OnHang,
    Seconds,
    YamlWords,
    note_unused_variables,
    read_nodes,
    with_environment,
)
from multinode.network.measure import Extent, check_reduction, scan_messages, scan_sizes
from multinode.records.benchmark import BACKENDS, DTYPE_BYTES, REDOPS, CollectiveTest, check_choice
from multinode.records.invocation import Invocation
from multinode.units import parse_size

# A training waits longer for a node that cannot be reached; a measurement with such a gap is worth nothing.
_LEASE_S = 30.0


class NcclTestInput(NodeInput, frozen=True, kw_only=True, rename={"set_": "set"}):
    """Options of `nccl-test`, and the collectives that are measured.

    Attributes:
        invocation: the command line itself; None from Python.
    """

    collectives: tuple[str, ...] = ()
    invocation: Invocation | None = None
    nodes: Count | None = None
    local: Annotated[int, Meta(ge=2)] | None = None
    workers_per_node: Count | None = None
    begin: str = "64K"
    end: str = "64M"
    factor: int = 4
    step: str | None = None
    iters: Count = 20
    warmup_iters: Count = 2
    verify: Annotated[int, Meta(ge=0)] = 1
    dtype: str = "float"
    op: str = "sum"
    max_seconds: Annotated[float, Meta(ge=0.1)] = 5.0
    backend: str | None = None
    like: str | None = None
    set_: YamlWords = ()
    tcp: bool = True
    pairs: bool = False
    compare: str | None = None
    tune: bool = False
    repeats: Annotated[int, Meta(ge=2, le=20)] = 3
    fresh: bool = False
    check: bool = True
    hang_timeout: Seconds = 300.0
    on_hang: OnHang = "report"

    def read(self, note: Note) -> tuple[Launch, Extent]:
        """The launch of the test, and what is measured beside it."""
        sizes = scan_sizes(
            parse_option("-b", self.begin, parse_size),
            parse_option("-e", self.end, parse_size),
            factor=self.factor,
            step_bytes=parse_option("-i", self.step, parse_size) if self.step is not None else None,
        )
        test = CollectiveTest(
            messages=scan_messages(self.collectives or ("all_reduce",), sizes),
            dtype=check_choice("dtype", self.dtype, tuple(DTYPE_BYTES)),
            redop=check_choice("op", self.op, REDOPS),
            iters=self.iters,
            warmup_iters=self.warmup_iters,
            max_seconds=self.max_seconds,
            check=self.verify,
            backend=check_choice("backend", self.backend, BACKENDS) if self.backend is not None else None,
        )
        check_reduction(self.op, self.dtype)
        like = load_job(Path(self.like), self.set_, parse_deepspeed_edits(())) if self.like is not None else None
        if self.set_ and like is None:
            raise UsageError("--set needs --like, whose job it changes", hint="add --like JOB.yaml")
        if self.local is not None and self.workers_per_node is not None:
            raise UsageError("--local already sets the number of workers", hint="remove --workers-per-node")
        if self.tune and (self.pairs or self.compare or self.local is not None):
            raise UsageError(
                "--tune measures one test with several settings between nodes; it cannot be combined with --pairs, "
                "--compare or --local"
            )
        if self.fresh and not self.tune:
            raise UsageError("--fresh needs --tune", hint="add --tune")
        # A training uses all slots; bare sizes are of the network between the nodes.
        workers = self.local or self.workers_per_node or (None if like is not None else 1)
        nodes = self._nodes(note)
        launch = Launch(
            cluster=nodes.cluster,
            hostfile=nodes.hostfile,
            job=test,
            workers_per_node=workers,
            command=self.invocation,
            execute=ExecuteOptions(
                kind="nccl-test", lease_s=_LEASE_S, stall_s=self.hang_timeout or None, on_stall=self.on_hang
            ),
            check=self.check,
        )
        launch = with_environment(launch, self)
        note_unused_variables(launch, note)
        if self.tune:
            return launch, Extent(like=like, fresh=self.fresh)
        return launch, Extent(tcp=self.tcp, pairs=self.pairs, compare=self.compare, like=like)

    def _nodes(self, note: Note) -> Nodes:
        try:
            return read_nodes(self.hosts, self.nodes, self.local, note)
        except UsageError as error:
            if self.hosts is not None or self.nodes is not None:
                raise
            also = "to run without nodes: multinode nccl-test --local 2"
            raise UsageError(error.message, hint=f"{error.hint}; {also}" if error.hint else also) from error
