"""Stalls: a run on which no node gets on, what its processes were doing then, and what that was taken to mean."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = [
    "Connection",
    "FlightRecord",
    "LastStep",
    "NodeDiagnosis",
    "ProcessDiagnosis",
    "Sockets",
    "Stall",
    "StallRecord",
]


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
        command: its short name.
        state: the kernel's letter (proc(5)), and in words `state_words`.
        state_before: the letter a moment earlier.
        cpu_s: processor seconds used between these two looks, which lay `looked_s` apart.
        wchan: the kernel function in which it waits; None is unknown or none.
        kernel_stack: where the agent may read it.
        sockets: of a worker; None is unknown.
        stack: Python stacks of all its threads, as `stack_source` printed them; None for the reason `stack_missing`.
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
        ranks: the workers that it should have.
        error: why it could not be asked; the rest is then empty.
        time_s: the node's wall clock.
        processes: launchers, then workers by rank.
        last_steps: by rank, also of workers that are gone.
        ras: what NCCL's RAS service answered; None for the reason `ras_missing`.
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


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """A time without a step or a line of log on any node, and what seems to be behind it.

    Attributes:
        time_s: when it was noticed, on the controller's wall clock.
        silent_s: since the last sign of progress.
        message: one sentence: who is behind, and why.
        hint: what mends it, or shows more.
        node: the node to blame; None where none could be told.
        node_rank: likewise.
        rank: the worker to blame.
        stack: its Python stack.
    """

    time_s: float
    silent_s: float
    message: str
    hint: str | None = None
    node: str | None = None
    node_rank: int | None = None
    rank: int | None = None
    stack: str = ""


class StallRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What `stall.json` keeps: the stalls of a run so far, and what the nodes said at the last of them."""

    schema: str = "multinode.stall/1"
    stalls: tuple[Stall, ...]
    nodes: tuple[NodeDiagnosis, ...]
