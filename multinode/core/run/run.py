"""Run: what happened to a plan. Written when a run starts and again whenever its state changes."""

from __future__ import annotations

import msgspec

from multinode.core.run.stall import Stall
from multinode.units import format_count

__all__ = ["Failure", "NodeRun", "Run", "RunStatus"]

RunStatus = str  # running | succeeded | failed | stopped | lost


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a run did not succeed: the first thing that went wrong.

    Attributes:
        rank: the worker's global rank, where one worker is to blame.
        exit_code: of the job on that node; None where it never ended or never started.
        signal: the signal's name that ended it.
        message: one sentence.
        log_tail: the last lines of that node's log, or the worker's own traceback.
        kind: `out_of_gpu_memory`, `out_of_memory`, `disk_full`, `version_mismatch`, `missing_module`, `missing_file`,
            `timeout`, `connection`, `killed`, `crashed`, `hang`, `node_lost` (power, kernel, or the network to
            it), `hardware` (a GPU, link, disk or memory of it failed first), `gpu_held` (somebody else computes on a
            GPU of it); None is none of these.
        time_s: when, on the controller's wall clock; of a node that was lost, when the last word came from it. None is
            unknown.
        consequences: of a node that was lost or whose hardware failed: how its peers failed then, a sentence a node.
    """

    node: str
    node_rank: int
    rank: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    message: str
    hint: str | None = None
    log_tail: str = ""
    kind: str | None = None
    time_s: float | None = None
    consequences: tuple[str, ...] = ()


class NodeRun(msgspec.Struct, frozen=True, kw_only=True):
    """How the job ended on one node.

    Attributes:
        state: `waiting`, `starting`, `running`, `stopping`, `ended` or `lost`.
        exit_code: the job's; None while it runs, or when a signal ended it.
        signal: the signal's name.
        cause: `exited`, `stopped`, `lease_expired`, `supervisor_lost`, `not_started`.
        ended_s: when, on the node's wall clock.
        processes_left: processes of the run still there after the stop; None is unknown.
        oom_kills: processes that the kernel killed for lack of memory meanwhile, in the job's control group where that
            can be seen, else on the whole node; None is unknown.
        disk_free_bytes: what was left where the run keeps its log, when the job ended; None is unknown.
        lost_s: of a node that was lost, when the last word came from it, on the controller's wall clock; None is
            unknown.
    """

    name: str
    node_rank: int
    state: str = "waiting"
    exit_code: int | None = None
    signal: str | None = None
    cause: str | None = None
    ended_s: float | None = None
    processes_left: int | None = None
    oom_kills: int | None = None
    disk_free_bytes: int | None = None
    lost_s: float | None = None


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as `run.json` keeps it.

    Attributes:
        job: the job in a few words.
        status: `running`, `succeeded`, `failed`, `stopped` or `lost`.
        started_s: controller's wall clock.
        ended_s: likewise; None while it runs.
        nodes: in node-rank order.
        first_failure: None when it succeeded.
        lease_s: how long the nodes go on without word from the controller.
        kind: `launch`, `nccl-test`, `bench`, `contrast`, `advise`, `sweep`, `import`.
        detached: whether it goes on without a controller.
        stalls: times in which no node got on; the last few.
    """

    schema: str = "multinode.run/1"
    run_id: str
    job: str
    engine: str
    status: RunStatus
    started_s: float
    ended_s: float | None = None
    world_size: int
    nodes: tuple[NodeRun, ...]
    first_failure: Failure | None = None
    lease_s: float | None = None
    kind: str = "launch"
    detached: bool = False
    stalls: tuple[Stall, ...] = ()

    @property
    def extent(self) -> str:
        """`4 workers on 2 nodes`."""
        return f"{format_count(self.world_size, 'worker')} on {format_count(len(self.nodes), 'node')}"
