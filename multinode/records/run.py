"""Run: the outcome of a plan, with stalls and failure. Written when a run starts and when its state changes."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from multinode.findings.finding import Finding
from multinode.records.invocation import Invocation
from multinode.records.plan import LaunchPlan
from multinode.records.status import Status
from multinode.stats.estimate import Estimate
from multinode.stats.unknown import UNMEASURED, Unknown
from multinode.units import format_count


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """A TCP connection of a worker: `established` or `connecting`, and the bytes in the kernel's queues."""

    state: str
    peer: str
    send_queue_bytes: int
    receive_queue_bytes: int


class Sockets(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's TCP connections: their number, and the fullest of them."""

    established: int
    connecting: int
    listed: tuple[Connection, ...] = ()


class ProcessDiagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the run."""

    role: str  # `worker`, or `launcher` for the processes above the workers
    pid: Annotated[int, Meta(ge=1)]
    rank: int | None = None  # global rank; None for a launcher
    local_rank: int | None = None  # None for a launcher
    command: str | None = None
    state: str  # the kernel's letter (proc(5)); `state_words` explains it
    state_words: str = ""
    state_before: str = ""  # the letter at the first look
    cpu_s: float | None = None  # CPU seconds used between the two looks, `looked_s` apart
    looked_s: float | None = None
    wchan: str | None = None  # the kernel function in which it waits; None if unknown or none
    kernel_stack: str | None = None
    sockets: Sockets | None = None
    stack: str | Unknown = UNMEASURED  # Python stacks of all threads, printed by `stack_source`
    stack_source: str | None = None
    # launched in groups of all workers; None for a launcher, or if the backend does not count
    collectives: int | None = None
    # what torch's flight recorder holds of it (`multinode/worker/flight.py`); None if it did not answer
    flight: str | None = None
    gpu: bool = False  # whether it has a GPU open


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
    """One node of a hanging run."""

    node: str
    node_rank: int
    ranks: tuple[int, ...]
    error: str | None = None  # why it could not be queried; the rest is then empty
    time_s: float | None = None
    processes: tuple[ProcessDiagnosis, ...] = ()  # launchers, then workers by rank
    last_steps: tuple[LastStep, ...] = ()  # by rank, including workers that have ended
    ras: str | Unknown = UNMEASURED  # the answer of NCCL's RAS service
    flight_records: tuple[FlightRecord, ...] = ()
    nccl_warnings: tuple[str, ...] = ()  # the last WARN lines of each process in NCCL's logs


class Stall(Finding, frozen=True, kw_only=True):
    """A time without a step or a log line on any node, with its likely cause; `hint` fixes it or shows more."""

    time_s: float  # when it was noticed, on the controller's wall clock
    silent_s: float  # since the last sign of progress
    node_rank: int | None = None  # of the node to blame; also `rank`, of the worker, and its `stack`
    rank: int | None = None
    stack: str = ""
    resumed_s: float | None = None  # the time of the next progress; None if there was none before its end


class StallRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `stall.json`: the stalls of a run so far, and the nodes' diagnosis at the last one."""

    schema: str = "multinode.stall/2"
    stalls: tuple[Stall, ...]
    nodes: tuple[NodeDiagnosis, ...]


RunStatus = str  # running | succeeded | failed | stopped | lost
SLOWER_THAN_ONE_NODE = "slower_than_one_node"
"""Stop reason: one node alone is faster, and the user asked to stop in that case."""


_STOPPED_BY = {
    "SIGINT": " by you",
    "stop": " by you",
    "SIGTERM": " by SIGTERM",
    "SIGHUP": " because its terminal was closed",
}


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a run failed: its first failure."""

    node: str
    node_rank: int
    rank: int | None = None  # the worker's global rank, if one worker is to blame
    exit_code: int | None = None  # of the job on that node; None if it never ended or never started
    signal: str | None = None
    message: str
    hint: str | None = None
    log_tail: str = ""  # the last lines of that node's log, or the worker's traceback
    # `out_of_gpu_memory`, `out_of_memory`, `disk_full`, `version_mismatch`, `missing_module`, `missing_file`,
    # `timeout`, `connection`, `configuration` (of the job, its launcher or a limit), `desync` (ranks call different
    # collectives), `killed`, `crashed`, `hang`, `node_lost` (power, kernel or network), `hardware` (a GPU, link, disk
    # or memory failed first), `gpu_held` (another process uses a GPU of it); None is other
    kind: str | None = None
    # the error's name in the catalog and on docs/reference/troubleshooting.md; None if it is not listed
    error_id: str | None = None
    cause: str | None = None  # the catalog's explanation
    time_s: float | None = None  # on the controller's wall clock; for a lost node, its last message. None if unknown.
    # for a lost node or failed hardware: how its peers failed then, one sentence per node; for any failure, what else
    # may have been first
    consequences: tuple[str, ...] = ()
    run_id: str | None = None  # the part that failed, of a run that consists of others; None is the run itself


class NodeRun(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a run: what it reported last, and whether it can still be reached."""

    name: str
    node_rank: int
    state: str = "waiting"  # `waiting`, `starting`, `running`, `stopping`, `ended` or `lost`
    status: Status = Status()  # the node's own
    lost_s: float | None = None  # the last message of a lost node, on the controller's wall clock; None if unknown


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a run with restarts; it is a run itself, with the same nodes, logs and figures as any."""

    run_id: str  # its own
    status: RunStatus
    started_s: float
    ended_s: float | None = None
    checkpoint: str | None = None  # the one it resumed from; None starts from scratch
    skipped: dict[str, str] = {}  # newer checkpoints that are incomplete, each with the reason
    world_size: int = 0  # its workers; 0 is unknown
    left_out: dict[str, str] = {}  # nodes of the run that it does without, each with the reason
    global_batch: int | None = None  # samples per optimizer step; None if unknown, as for a script
    first_step: int = 0  # optimizer steps done before it
    last_step: int = 0  # optimizer steps done when it ended
    first_failure: Failure | None = None
    lost_steps: int | None = None  # steps that the next attempt repeated; None for the last one
    # from its failure to the start of the next attempt, plus the time of the lost steps; None for the last one
    lost_s: float | None = None
    not_restarted: str | None = None  # why no attempt follows; None if one does, or if it succeeded


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of `run.json`, the record of a run.

    Attributes:
        status: `running`, `succeeded`, `failed`, `stopped` or `lost`.
        started_s: when the run started, by the controller's wall clock.
        lease_s: how long the nodes continue without contact with the controller.
        kind: `launch`, `nccl-test`, `bench`, `contrast`, `advise`, `sweep`, `import`, `tune`, `tuning`.
        detached: whether the run continues without a controller.
        attempts: the attempts of a run with restarts, oldest first. Empty for other runs.
        stop_reason: why a run was stopped: the name of a signal, `stop` (the command), or SLOWER_THAN_ONE_NODE.
        command: the command line that started the run; None if it was started from Python.
        part_of: id of the run of which this run is a part, such as a contrast; None if it is not part of another run.
        has_parts: whether the run consists of other runs, which have plans, logs and samples.
        missing_bytes: bytes of logs and samples that could not be written here. `multinode attach` fetches them.
    """

    schema: str = "multinode.run/2"
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
    command: Invocation | None = None
    part_of: str | None = None
    has_parts: bool = False
    missing_bytes: int = 0

    @property
    def outcome(self) -> str:
        """The status, and who stopped it: `stopped by you`."""
        return self.status + (_STOPPED_BY.get(self.stop_reason, "") if self.status == "stopped" else "")

    @property
    def hang(self) -> Stall | None:
        """The standstill in which it was stopped; None of any other run."""
        last = self.stalls[-1] if self.stalls and self.status == "stopped" else None
        return last if last is not None and last.resumed_s is None else None

    @property
    def failure(self) -> Failure | None:
        """Its first failure, or the hang in which it was stopped, for a run that needed its figures."""
        hang = self.hang
        if self.first_failure is not None or hang is None:
            return self.first_failure
        return Failure(
            node=hang.node or self.nodes[hang.node_rank or 0].name,
            node_rank=hang.node_rank or 0,
            rank=hang.rank,
            message=hang.message,
            hint=hang.hint,
            kind="hang",
        )

    @property
    def extent(self) -> str:
        """`4 workers on 2 nodes`."""
        return f"{format_count(self.world_size, 'worker')} on {format_count(len(self.nodes), 'node')}"


def new_run(plan: LaunchPlan, started_s: float, part_of: str | None = None) -> Run:
    """A run of a plan that has just started, as a part of another one or by itself."""
    return Run(
        run_id=plan.run_id,
        job=plan.job,
        engine=plan.engine,
        status="running",
        started_s=started_s,
        world_size=plan.world_size,
        nodes=tuple(NodeRun(name=place.node, node_rank=place.node_rank) for place in plan.places),
        command=plan.command,
        part_of=part_of,
    )


def make_run_id() -> str:
    """A unique name that sorts by date."""
    return time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)


def node_run_id(run_id: str, node_rank: int) -> str:
    """The run's name on one node: nodes may share a home directory, and with it the directory of runs."""
    return f"{run_id}.{node_rank}"


def parse_node_run_id(name: str) -> str:
    """The run id in the name of a run on a node."""
    return re.sub(r"\.\d+$", "", name)


def match_runs(names: Sequence[str], begin: str) -> list[str]:
    """The names that match a run id or its beginning; should be exactly one.

    Parts of a run, such as attempts, are named after it; the run's own name refers to the run.
    """
    if begin in names:
        return [begin]
    matching = [name for name in names if name.startswith(begin)]
    first = min(matching, key=len, default="")
    return [first] if matching and all(name == first or name.startswith(f"{first}-") for name in matching) else matching


LEAST_STEPS = 15
"""Recorded steps needed for a verdict, including warm-up."""
CERTAIN_STEPS = 120
"""Measured steps needed for a verdict that may end a run: with fewer, intervals cover less than they claim.

For steps with an autocorrelation of 0.6, the 95% interval of 10 steps covers in 87 of 100 runs, of 120 in 95 (ADR
0035).
"""
VERDICT_FILE = "early-verdict.json"
"""Its file in the run directory."""


class Projection(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train the rest."""

    speedup: Estimate  # its samples/s over those of the unchanged run
    left_s: Estimate | None = None  # time for the remaining steps; None if their number is unknown


class BestChange(Projection, frozen=True, kw_only=True):
    """The setting that would make these nodes fastest."""

    name: str  # in a few words: `gradients in fp16`
    options: str = ""  # of `multinode launch`; empty if it needs manual changes
    samples_ratio: float = 1.0  # samples per step relative to now: a larger global batch changes the optimization


class RunSteps(msgspec.Struct, frozen=True, kw_only=True):
    """How far the run is, and where it runs."""

    run_id: str
    node: str  # the first one, which would train alone with its `workers_per_node`
    nodes: int
    workers_per_node: int
    step: int  # the last one that all workers have ended; `total_steps` of the training, None is unknown
    total_steps: int | None = None
    recorded: int  # steps that were recorded by all workers; `measured` of them those that count
    measured: int


class EarlyVerdict(RunSteps, frozen=True, kw_only=True):
    """Whether one node alone would be faster than the run; `early-verdict.json` of a run."""

    schema: str = "multinode.early-verdict/2"
    now: Projection | None = None  # the run as it is; its speed-up is 1 by definition
    # the first node alone with its workers of this run, predicted; None if that is unknown, as `findings` say
    one_node: Projection | None = None
    best: BestChange | None = None  # None where no setting pays, or none could be predicted
    # whether the training fits one node's memory: `fits`, `too_small` or `unknown`
    memory: Literal["fits", "too_small", "unknown"] = "unknown"
    needed_gib: float | None = None  # allocation per worker on one node, if `too_small`
    gpu_gib: float | None = None  # memory of its GPU, if `too_small`
    shortfall: Finding | None = None  # the run is slower than its network allows; None if it is not, or unknown
    core_wait_ms: float | None = None  # time per step that the first node's workers waited for CPU cores, if relevant
    findings: tuple[Finding, ...] = ()  # which is faster; the time left or the best change; what limits the verdict

    @property
    def is_certain(self) -> bool:
        """Whether the whole interval favors one node, its memory suffices, and there are enough steps."""
        return self.favours_one_node and self.measured >= CERTAIN_STEPS

    @property
    def exceeds_run(self) -> bool:
        """Whether it is inconclusive, by more time than the run has left: it then helps nobody."""
        now, alone = self.now, self.one_node
        if now is None or now.left_s is None or alone is None or alone.left_s is None:
            return False
        is_open = alone.speedup.low <= 1 <= alone.speedup.high
        return is_open and alone.left_s.high - alone.left_s.low >= now.left_s.value

    @property
    def favours_one_node(self) -> bool:
        """Whether the whole interval favors one node, and its memory suffices."""
        return self.one_node is not None and self.one_node.speedup.low > 1 and self.memory == "fits"
