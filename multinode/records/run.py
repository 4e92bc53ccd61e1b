"""Run: what happened to a plan, its stalls and why it failed. Written when a run starts and when its state changes."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from multinode.records.plan import LaunchPlan
from multinode.units import format_count


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """A TCP connection of a worker: `established` or `connecting`, and what the kernel holds for it."""

    state: str
    peer: str
    send_queue_bytes: int
    receive_queue_bytes: int


class Sockets(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's TCP connections: how many, and the fullest of them."""

    established: int
    connecting: int
    listed: tuple[Connection, ...] = ()


class ProcessDiagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the run, as it was found.

    Attributes:
        role: `worker`, or `launcher`, which is whatever stands above the workers.
        rank: global rank, None of a launcher; likewise `local_rank`.
        state: the kernel's letter (proc(5)), and in words `state_words`.
        state_before: the letter a moment earlier.
        cpu_s: processor seconds used between these two looks, which lay `looked_s` apart.
        wchan: the kernel function in which it waits; None is unknown or none.
        stack: Python stacks of all its threads, as `stack_source` printed them; None for the reason `stack_missing`.
        collectives: launched in groups of all workers; None of a launcher, and where its backend does not count.
        gpu: whether it has a GPU open.
    """

    role: str
    pid: Annotated[int, Meta(ge=1)]
    rank: int | None = None
    local_rank: int | None = None
    command: str | None = None
    state: str
    state_words: str = ""
    state_before: str = ""
    cpu_s: float | None = None
    looked_s: float | None = None
    wchan: str | None = None
    kernel_stack: str | None = None
    sockets: Sockets | None = None
    stack: str | None = None
    stack_source: str | None = None
    stack_missing: str | None = None
    collectives: int | None = None
    gpu: bool = False


class LastStep(msgspec.Struct, frozen=True, kw_only=True):
    """The last step that a rank has recorded; `time_s` is the node's wall clock."""

    rank: int
    step: int
    time_s: float


class FlightRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A dump of PyTorch's flight recorder on the node."""

    path: str
    size_bytes: int


class NodeDiagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a run that hangs.

    Attributes:
        error: why it could not be asked; the rest is then empty.
        processes: launchers, then workers by rank.
        last_steps: by rank, also of workers that are gone.
        ras: what NCCL's RAS service answered; None for the reason `ras_missing`.
        nccl_warnings: the last WARN lines of each process in NCCL's own logs.
    """

    node: str
    node_rank: int
    ranks: tuple[int, ...]
    error: str | None = None
    time_s: float | None = None
    processes: tuple[ProcessDiagnosis, ...] = ()
    last_steps: tuple[LastStep, ...] = ()
    ras: str | None = None
    ras_missing: str | None = None
    flight_records: tuple[FlightRecord, ...] = ()
    nccl_warnings: tuple[str, ...] = ()


class StallCause(msgspec.Struct, frozen=True, kw_only=True):
    """What seems to be behind a stall; `hint` is what fixes it, or shows more.

    Attributes:
        code: as of `Hang` (diagnose/stall.py); empty in what earlier releases stored.
    """

    code: str = ""
    message: str
    hint: str | None = None
    node: str | None = None
    node_rank: int | None = None
    rank: int | None = None
    stack: str = ""


class Stall(StallCause, frozen=True, kw_only=True):
    """A time without a step or a line of log on any node, with its cause.

    Attributes:
        time_s: when it was noticed, on the controller's wall clock.
        silent_s: since the last sign of progress.
    """

    time_s: float
    silent_s: float


class StallRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What `stall.json` keeps: the stalls of a run so far, and what the nodes said at the last of them."""

    schema: str = "multinode.stall/1"
    stalls: tuple[Stall, ...]
    nodes: tuple[NodeDiagnosis, ...]


RunStatus = str  # running | succeeded | failed | stopped | lost
SLOWER_THAN_ONE_NODE = "slower_than_one_node"
"""Why a run was stopped: one node alone is faster, and the user wanted it stopped then."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a run did not succeed: the first thing that went wrong.

    Attributes:
        rank: the worker's global rank, where one worker is to blame.
        exit_code: of the job on that node; None where it never ended or never started.
        log_tail: the last lines of that node's log, or the worker's own traceback.
        kind: `out_of_gpu_memory`, `out_of_memory`, `disk_full`, `version_mismatch`, `missing_module`, `missing_file`,
            `timeout`, `connection`, `configuration` (of the job, its launcher or a limit), `desync` (ranks that do not
            do the same), `killed`, `crashed`, `hang`, `node_lost` (power, kernel, or the network to it), `hardware` (a
            GPU, link, disk or memory of it failed first), `gpu_held` (somebody else computes on a GPU of it); None is
            none of these.
        error_id: the error's name in the catalogue and on the page docs/reference/troubleshooting.md; None is none of
            it.
        cause: what the catalogue says of it.
        time_s: when, on the controller's wall clock; of a node that was lost, when the last word came from it. None is
            unknown.
        consequences: of a node that was lost or whose hardware failed: how its peers failed then, a sentence a node; of
            any, what may as well have been first.
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
    error_id: str | None = None
    cause: str | None = None
    time_s: float | None = None
    consequences: tuple[str, ...] = ()


class NodeRun(msgspec.Struct, frozen=True, kw_only=True):
    """How the job ended on one node.

    Attributes:
        state: `waiting`, `starting`, `running`, `stopping`, `ended` or `lost`.
        exit_code: the job's; None while it runs, or when a signal ended it.
        cause: `exited`, `stopped`, `lease_expired`, `supervisor_lost`, `not_started`.
        ended_s: when, on the node's wall clock.
        processes_left: processes of the run still there after the stop; None is unknown.
        oom_kills: processes that the kernel killed for lack of memory meanwhile, in the job's control group where that
            can be seen, else on the whole node; None is unknown.
        disk_free_bytes: what was left where the run keeps its log, when the job ended; None is unknown.
        stopped_by: whose order stopped it; None where none did, as where the supervisor was sent a signal.
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
    stopped_by: str | None = None
    lost_s: float | None = None


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a run that is restarted; it is a run itself, with the same nodes, logs and figures as any.

    Attributes:
        run_id: its own.
        checkpoint: the one that it went on from; None begins anew.
        skipped: checkpoints that were newer, and why each is not complete.
        world_size: its workers; 0 is unknown.
        left_out: nodes of the run that it goes on without, and why.
        global_batch: samples of an optimizer step; None is unknown, as of a script.
        first_step: optimizer steps that were done before; `last_step` when it ended, before its first step the same.
        lost_steps: steps of it that the attempt after it did again; None of the last one.
        lost_s: from its failure to the start of the next attempt, and what the lost steps had taken; likewise.
        not_restarted: why there is no attempt after it; None where there is one, or where it succeeded.
    """

    run_id: str
    status: RunStatus
    started_s: float
    ended_s: float | None = None
    checkpoint: str | None = None
    skipped: dict[str, str] = {}
    world_size: int = 0
    left_out: dict[str, str] = {}
    global_batch: int | None = None
    first_step: int = 0
    last_step: int = 0
    first_failure: Failure | None = None
    lost_steps: int | None = None
    lost_s: float | None = None
    not_restarted: str | None = None


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as `run.json` keeps it.

    Attributes:
        status: `running`, `succeeded`, `failed`, `stopped` or `lost`.
        started_s: controller's wall clock.
        lease_s: how long the nodes go on without word from the controller.
        kind: `launch`, `nccl-test`, `bench`, `contrast`, `advise`, `sweep`, `import`, `tune`, `tuning`.
        detached: whether it goes on without a controller.
        attempts: of a run that is restarted when it fails, oldest first; empty of any other.
        stop_reason: of a run that was stopped here: a signal's name, `stop` (the verb), or SLOWER_THAN_ONE_NODE.
        missing_bytes: of its logs and samples, what could not be written here; `multinode attach` fetches it.
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
    attempts: tuple[Attempt, ...] = ()
    stop_reason: str = ""
    missing_bytes: int = 0

    @property
    def extent(self) -> str:
        """`4 workers on 2 nodes`."""
        return f"{format_count(self.world_size, 'worker')} on {format_count(len(self.nodes), 'node')}"


def new_run(plan: LaunchPlan, started_s: float) -> Run:
    """A run of a plan that has just begun."""
    return Run(
        run_id=plan.run_id,
        job=plan.job,
        engine=plan.engine,
        status="running",
        started_s=started_s,
        world_size=plan.world_size,
        nodes=tuple(NodeRun(name=node.node, node_rank=node.node_rank) for node in plan.nodes),
    )


def make_run_id() -> str:
    """A name that sorts by date and that no two runs share."""
    return time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)


def node_run_id(run_id: str, node_rank: int) -> str:
    """What a run is called on one node: nodes may share a home directory, and with it the place of their runs."""
    return f"{run_id}.{node_rank}"


def parse_node_run_id(name: str) -> str:
    """The run id in what a run is called on a node."""
    return re.sub(r"\.\d+$", "", name)


def match_runs(names: Sequence[str], begin: str) -> list[str]:
    """Those of the names that somebody means who gives an id, or the beginning of one; one is what it should be.

    Parts of a run are named after it, as attempts or what is compared: whoever names it means it.
    """
    if begin in names:
        return [begin]
    matching = [name for name in names if name.startswith(begin)]
    first = min(matching, key=len, default="")
    return [first] if matching and all(name == first or name.startswith(f"{first}-") for name in matching) else matching
