"""find_hang: from what all nodes said of a run that hangs, which rank is behind, why, and what to do. Pure.

Knows states, stacks, steps and queues.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from multinode.cluster.hostfile import fold_numbers
from multinode.diagnose.desync import MISSING, RankPlace, find_desync
from multinode.diagnose.failure import told_by_nccl
from multinode.diagnose.place import LIBRARY
from multinode.records.flight import decode_flight
from multinode.records.run import NodeDiagnosis, ProcessDiagnosis, Stall
from multinode.stats.unknown import or_none, reason_of

# CPython's faulthandler:   File "/home/a/train.py", line 12 in main
_FAULTHANDLER = re.compile(r'^  File "(?P<path>[^"]*)", line (?P<line>\d+|\?\?\?) in (?P<name>.+)$')
# py-spy dump:     main (train.py:12)
_PY_SPY = re.compile(r"^    (?P<name>\S.*) \((?P<path>.*?)(?::(?P<line>\d+))?\)$")
_THREAD = re.compile(r"^(?:Current thread|Thread) ")
_COLLECTIVE_FILES = re.compile(
    r"torch/distributed/(?:distributed_c10d|rendezvous|_functional_collectives)|deepspeed/comm/"
)
_BACKWARD_FILES = re.compile(r"torch/autograd/|torch/_tensor\.py$")
_SYNCHRONIZE_FILES = re.compile(r"torch/(?:cuda|accelerator|xpu|npu)/")
_SPINS = 0.5  # share of a processor from which on a process is said to compute
_MOST_FRAMES = 20
_CONSTRUCTOR = re.compile(r"torch/nn/parallel/distributed\.py$")


class StackFrame(msgspec.Struct, frozen=True):
    """One call."""

    path: str
    line: str
    name: str

    @property
    def function(self) -> str:
        """The name alone, where py-spy puts the class before it."""
        return self.name.rpartition(".")[2]

    @property
    def place(self) -> str:
        """`main (train.py:12)`."""
        return f"{self.name} ({self.path.rpartition('/')[2]}:{self.line})"


def parse_main_thread(stack: str) -> tuple[StackFrame, ...]:
    """Frames of the main thread, innermost first; empty where there is none to be read.

    faulthandler prints the youngest thread first and so the main thread last; py-spy names it.
    """
    blocks: list[list[str]] = []
    for line in stack.splitlines():
        if _THREAD.match(line):
            blocks.append([line])
        elif blocks:
            blocks[-1].append(line)
    if not blocks:
        return ()
    named = [block for block in blocks if "MainThread" in block[0]]
    lines = (named or blocks[-1:])[0][1:]
    matches = (_FAULTHANDLER.match(line) or _PY_SPY.match(line) for line in lines)
    return tuple(
        StackFrame(match["path"], match["line"] or "?", match["name"]) for match in matches if match is not None
    )


def find_wait(frames: Sequence[StackFrame]) -> str | None:
    """The collective, `backward` or `synchronize` that these frames wait in: it ends when the other ranks get there."""
    for frame in frames:
        # The innermost function of the interface: wrappers and private ones stand on either side of it.
        name = frame.function
        if _COLLECTIVE_FILES.search(frame.path) and not name.startswith("_") and name not in {"wrapper", "inner"}:
            return name
    for pattern, word, functions in (
        (_BACKWARD_FILES, "backward", {"backward", "_engine_run_backward"}),
        (_SYNCHRONIZE_FILES, "synchronize", {"synchronize"}),
        (_CONSTRUCTOR, "the start of DistributedDataParallel", {"__init__"}),
    ):
        if any(pattern.search(frame.path) and frame.function in functions for frame in frames):
            return word
    return None


def describe_place(frames: Sequence[StackFrame]) -> str:
    """The call in words."""
    own = next((frame for frame in frames if not LIBRARY.search(frame.path)), None)
    if own is None or own == frames[0]:
        return frames[0].place
    return f"{frames[0].place}, called from {own.place}"


_DIFFERENT = re.compile(r"^ *Communicator ranks have different (.+) operation counts$")
_LAUNCHED = r"(?:launched up to operation (?P<count>\d+)|not launched any operations)"
_SEVERAL = re.compile(rf"^ *\d+ ranks have {_LAUNCHED}$")
_PROCESS = r" -- (?:GPU .* managed by process (?P<pid>\d+) on node .*|\[process information not found\])$"
_ONE = re.compile(rf"^ *Rank (?P<rank>\d+) has {_LAUNCHED}{_PROCESS}")
_OF_SEVERAL = re.compile(rf"^ *Rank (?P<rank>\d+){_PROCESS}")


class LaggingRank(NamedTuple):
    """A rank that launched fewer operations than another of its communicator."""

    rank: int  # in the communicator, which need not be the global rank
    pid: int | None  # of its process as that knows it; None where RAS does not say
    operation: str  # `AllReduce`; releases before NCCL counted by operation say `collective`
    launched: int  # by this rank
    most: int  # launched by any rank of the communicator


def find_lagging(text: str) -> tuple[LaggingRank, ...]:
    """Of each mismatch that RAS reports, the ranks that it lists with the smallest count.

    RAS lists small groups of ranks alone: a rank that lags with most others is not among them.
    """
    lagging: list[LaggingRank] = []
    operation: str | None = None
    counts: list[int] = []
    listed: list[tuple[int, int | None, int]] = []

    def close() -> None:
        if operation is not None and counts:
            fewest, most = min(counts), max(counts)
            behind = [entry for entry in listed if entry[2] == fewest < most]
            lagging.extend(LaggingRank(rank, pid, operation, count, most) for rank, pid, count in behind)

    for line in text.splitlines():
        if match := _DIFFERENT.match(line):
            close()
            operation, counts, listed = match[1], [], []
        elif match := _SEVERAL.match(line):
            counts.append(int(match["count"] or 0))
        elif match := _ONE.match(line):
            counts.append(int(match["count"] or 0))
            listed.append((int(match["rank"]), _number(match["pid"]), counts[-1]))
        elif (match := _OF_SEVERAL.match(line)) and counts:
            listed.append((int(match["rank"]), _number(match["pid"]), counts[-1]))
        elif not line.strip():
            close()
            operation, counts, listed = None, [], []
    close()
    return tuple(lagging)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None else None


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """One worker that should be there."""

    rank: int
    node: NodeDiagnosis
    process: ProcessDiagnosis | None
    frames: tuple[StackFrame, ...]  # of its main thread, innermost first; empty if unknown
    step: int | None

    @property
    def state(self) -> str | None:
        """The kernel's letter; None of no process."""
        return self.process.state if self.process is not None else None

    @property
    def pid(self) -> int | None:
        """Its process's id; None of no process."""
        return self.process.pid if self.process is not None else None

    @property
    def waits_in(self) -> str | None:
        """The collective in which it stands."""
        return find_wait(self.frames)

    @property
    def place(self) -> str:
        """Where it stands, whether it waits or not."""
        return self.waits_in or (describe_place(self.frames) if self.frames else "")


_Ranks = Sequence[RankState]


class _Hanging(msgspec.Struct, frozen=True, kw_only=True):
    """What all nodes said, and when."""

    nodes: Sequence[NodeDiagnosis]
    ranks: tuple[RankState, ...]  # all that should be there, of the nodes that answered
    time_s: float
    silent_s: float

    def found(self, code: str, message: str, hint: str, node: NodeDiagnosis | None = None) -> Stall:
        """A hang for which no rank is to blame, but maybe a node."""
        name, rank = (node.node, node.node_rank) if node is not None else (None, None)
        return Stall(
            code=code,
            message=message,
            hint=hint,
            node=name,
            node_rank=rank,
            time_s=self.time_s,
            silent_s=self.silent_s,
        )

    def blame(self, code: str, ranks: _Ranks, text: str, hint: str, *, others: str | None = None) -> Stall:
        """A hang of these ranks, of which the text says in the plural what they do; the first of them is to blame."""
        verb, _, rest = text.partition(" ")
        if len(ranks) == 1:
            verb = {"are": "is", "have": "has", "wait": "waits"}.get(verb, verb)
        message = f"{_names(ranks)} {verb} {rest}{_others(self.ranks, ranks) if others is None else others}"
        stall = self.found(code, message, hint, ranks[0].node)
        return msgspec.structs.replace(stall, rank=ranks[0].rank, stack=_stack_text(ranks[0]))

    def network_hint(self, hint: str) -> str:
        """What NCCL warned of, before a hint where the network may be the cause, or NCCL's settings."""
        for node in self.nodes:
            warning = told_by_nccl(node.nccl_warnings)
            if warning is not None and warning.error is not None:
                fix = warning.error.fix_on(node.node)
                return f"NCCL on {node.node} warns: {warning.text}: {fix}; {hint}"
        return hint


def find_hang(nodes: Sequence[NodeDiagnosis], time_s: float, silent_s: float) -> Stall:
    """Say which rank is behind.

    The surest sign decides: a worker that is stopped; one that is gone; one that the kernel holds; a node that does not
    answer; workers that do not meet in a collective, by torch's flight recorder; one worker outside of any collective
    while others wait in one, where the host waits for its collectives; one that launched fewer collectives than others,
    by their own counts or NCCL's; workers in different collectives; one with fewer steps than the rest; a connection on
    which nothing gets through. Without any of these nobody is blamed.
    """
    ranks = tuple(_rank(node, number) for node in nodes if node.error is None for number in node.ranks)
    hanging = _Hanging(nodes=nodes, ranks=ranks, time_s=time_s, silent_s=silent_s)
    stalls = (stall for find in _CAUSES if (stall := find(hanging)) is not None)
    return next(stalls, None) or _unexplained(hanging)


def _rank(node: NodeDiagnosis, number: int) -> RankState:
    process = next((process for process in node.processes if process.rank == number), None)
    frames = parse_main_thread(or_none(process.stack) or "") if process is not None else ()
    step = next((last.step for last in node.last_steps if last.rank == number), None)
    return RankState(rank=number, node=node, process=process, frames=frames, step=step)


def _stopped(run: _Hanging) -> Stall | None:
    ranks = [rank for rank in run.ranks if rank.state in {"T", "t"}]
    if not ranks:
        return None
    first = ranks[0]
    if first.state == "t":
        hint = f"close the debugger, or resume the process; it traces pid {first.pid} on {first.node.node}"
        return run.blame("traced", ranks, "are held by a debugger (state t)", hint)
    pids = " ".join(str(rank.pid) for rank in ranks if rank.node is first.node)
    hint = f"resume it, on {first.node.node}: kill -CONT {pids}"
    return run.blame("stopped", ranks, "are stopped (state T) by SIGSTOP", hint)


def _gone(run: _Hanging) -> Stall | None:
    ranks = [rank for rank in run.ranks if rank.state in {None, "Z", "X"}]
    if not ranks:
        return None
    steps = {rank.step for rank in ranks if rank.step is not None}
    if len(ranks) == len(run.ranks) and not steps:
        return run.found(
            "no_workers",
            "no worker has started on any node: the launchers are waiting for each other",
            run.network_hint(
                "a port between the nodes may be closed, or the launchers disagree on the rendezvous: multinode check"
            ),
        )
    hint = f"see its last lines: multinode logs last --node {ranks[0].node.node}"
    if not steps and all(rank.state is None for rank in ranks):
        return run.blame("never_there", ranks, "have no process: it was not started or has ended", hint)
    after = f" after step {steps.pop()}" if len(steps) == 1 else ""
    who = "it" if len(ranks) == 1 else "they"
    return run.blame("gone", ranks, f"have no process left: {who} ended{after}", hint)


def _uninterruptible(run: _Hanging) -> Stall | None:
    # Twice in a row: a moment of it belongs to every disk access.
    ranks = [rank for rank in run.ranks if rank.process and rank.process.state == rank.process.state_before == "D"]
    if not ranks:
        return None
    where = f", in {ranks[0].process.wchan}" if ranks[0].process and ranks[0].process.wchan else ""
    text = (
        f"are in uninterruptible sleep (state D{where}): a disk, a network file system or a driver on that node does "
        "not answer"
    )
    hint = f"look at the kernel messages and disks of {ranks[0].node.node}: dmesg -T | tail; df -h"
    return run.blame("uninterruptible", ranks, text, hint)


def _launcher_stopped(run: _Hanging) -> Stall | None:
    for node in run.nodes:
        for process in node.processes:
            if process.role == "launcher" and process.state == "T":
                who = f"the launcher on {node.node} ({process.command}, pid {process.pid})"
                hint = f"resume it, on {node.node}: kill -CONT {process.pid}"
                return run.found("launcher_stopped", f"{who} is stopped (state T) by SIGSTOP", hint, node)
    return None


def _silent_node(run: _Hanging) -> Stall | None:
    node = next((node for node in run.nodes if node.error is not None), None)
    if node is None:
        return None
    message = f"{node.node} did not report what its ranks are doing: {node.error}"
    return run.found("silent_node", message, f"see whether it is up: ssh {node.node} uptime", node)


def _desync(run: _Hanging) -> Stall | None:
    """Ranks that do not meet in a collective, by torch's flight recorder, and where they are by their stacks."""
    told = {rank.rank: decode_flight(rank.process.flight) for rank in run.ranks if rank.process and rank.process.flight}
    dumps = {rank: dump for rank, dump in told.items() if dump is not None}
    found = find_desync(dumps, {rank.rank: _rank_place(rank) for rank in run.ranks if rank.frames})
    if found is None:
        return None
    first = next(rank for rank in run.ranks if rank.rank == found.ranks[0])
    slow = "; if it is only slow, set a longer --hang-timeout" if found.code == MISSING.code else ""
    stall = run.found(found.code, found.message, f"{found.hint}{slow}", first.node)
    return msgspec.structs.replace(stall, rank=found.blamed, stack=_stack_text(first))


def _rank_place(rank: RankState) -> RankPlace:
    own = next((frame for frame in rank.frames if not LIBRARY.search(frame.path)), None)
    line = f"{own.path.rpartition('/')[2]}:{own.line}" if own is not None else ""
    return RankPlace(
        collective=line if rank.waits_in else "", elsewhere="" if rank.waits_in else f"{rank.place}{_busy(rank)}"
    )


def _stack_text(rank: RankState) -> str:
    return "\n".join(f"{frame.path}:{frame.line} in {frame.name}" for frame in rank.frames[:_MOST_FRAMES])


def _elsewhere(run: _Hanging) -> Stall | None:
    """Some ranks stand outside of what the others wait in.

    With GPUs that is no sign: the host launches a collective and goes on, to block wherever it reads a result.
    """
    ranks = [rank for rank in run.ranks if rank.frames and rank.waits_in is None]
    on_gpu = any(rank.process is not None and rank.process.gpu for rank in run.ranks)
    if not ranks or on_gpu or not any(rank.waits_in for rank in run.ranks):
        return None
    text = f"are in {ranks[0].place}{_busy(ranks[0])}{_behind(run.ranks, ranks)}"
    hint = "its full stack is in stall.json; if it is only slow, set a longer --hang-timeout"
    return run.blame("elsewhere", ranks, text, hint)


def _fewest_collectives(run: _Hanging) -> Stall | None:
    counts = [rank.process.collectives if rank.process is not None else None for rank in run.ranks]
    known_counts = [count for count in counts if count is not None]
    if len(known_counts) < len(counts) or len(set(known_counts)) < 2:  # noqa: PLR2004 - all have launched as many
        return None
    ranks = [rank for rank, count in zip(run.ranks, known_counts, strict=True) if count == min(known_counts)]
    text = f"launched {min(known_counts)} collectives while others launched {max(known_counts)}"
    return _late(run, "fewer_collectives", ranks, text)


def _lagging_in_nccl(run: _Hanging) -> Stall | None:
    for node in run.nodes:
        for lag in find_lagging(or_none(node.ras) or ""):
            ranks = [rank for rank in run.ranks if lag.pid is not None and rank.pid == lag.pid]
            if len(ranks) == 1:
                text = (
                    f"launched {lag.launched} {lag.operation} operations while another launched {lag.most} (NCCL RAS)"
                )
                return _late(run, "fewer_operations", ranks, text)
    return None


def _late(run: _Hanging, code: str, ranks: _Ranks, text: str) -> Stall:
    place = f"; rank {ranks[0].rank} is executing {ranks[0].place}" if ranks[0].frames else ""
    return run.blame(code, ranks, f"have {text}{place}", "its full stack is in stall.json")


def _disagreement(run: _Hanging) -> Stall | None:
    names = collections.Counter(rank.waits_in for rank in run.ranks if rank.waits_in is not None)
    if len(names) < 2 or sum(names.values()) < len(run.ranks):  # noqa: PLR2004 - two make a disagreement
        return None
    rarest = min(names, key=lambda name: (names[name], name))
    ranks = [rank for rank in run.ranks if rank.waits_in == rarest]
    hint = "every rank must call the same collectives in the same order; see where each one is in stall.json"
    return run.blame("disagreement", ranks, f"wait in {rarest}{_behind(run.ranks, ranks)}", hint)


def _fewest_steps(run: _Hanging) -> Stall | None:
    steps = [rank.step or 0 for rank in run.ranks]
    if not steps or min(steps) == max(steps):
        return None
    ranks = [rank for rank in run.ranks if (rank.step or 0) == min(steps)]
    where = f" and waits in {ranks[0].waits_in}" if ranks[0].waits_in else ""
    text = f"are behind at step {min(steps)} of {max(steps)}{where}"
    return run.blame("fewer_steps", ranks, text, "its position is in stall.json")


def _connection(run: _Hanging) -> Stall | None:
    for rank in run.ranks:
        for peer in rank.process.sockets.listed if rank.process and rank.process.sockets else ():
            if peer.state == "connecting" or peer.send_queue_bytes:
                text = f"cannot deliver {peer.send_queue_bytes} bytes to {peer.peer}"
                if peer.state == "connecting":
                    text = f"cannot connect to {peer.peer}"
                names = {each.waits_in for each in run.ranks if each.frames}
                all_wait = len(names) == 1 and None not in names
                others = f"; all {len(run.ranks)} ranks wait in {names.pop()}" if all_wait else ""
                hint = run.network_hint("test the network between the nodes: multinode check")
                return run.blame("connection", [rank], text, hint, others=others)
    return None


_CAUSES: tuple[Callable[[_Hanging], Stall | None], ...] = (
    _stopped,
    _gone,
    _uninterruptible,
    _launcher_stopped,
    _silent_node,
    _desync,
    _elsewhere,
    _fewest_collectives,
    _lagging_in_nccl,
    _disagreement,
    _fewest_steps,
    _connection,
)


def _unexplained(run: _Hanging) -> Stall:
    places = {rank.place for rank in run.ranks if rank.frames}
    count = len(run.ranks)
    if len(places) == 1 and all(rank.waits_in for rank in run.ranks):
        message = f"all {count} ranks wait in {places.pop()}, and none is behind"
        hint = run.network_hint("test the backend and the network between the nodes: multinode check")
        return run.found("all_wait", message, hint)
    if len(places) == 1 and all(rank.frames for rank in run.ranks):
        hint = run.network_hint("if this is only slow, set a longer --hang-timeout")
        return run.found("same_place", f"all {count} ranks are in {places.pop()}", hint)
    unknown = [rank for rank in run.ranks if not rank.frames]
    reason = next(filter(None, (reason_of(rank.process.stack) for rank in unknown if rank.process)), None)
    why = f" ({_names(unknown)} returned no stack: {reason})" if reason else ""
    return run.found(
        "unknown",
        f"state, stack and steps show no rank that is behind{why}",
        run.network_hint("see what each process is doing in stall.json"),
    )


def _names(ranks: _Ranks) -> str:
    """`rank 3 on node1`, `ranks 2, 3 on node1`, `ranks 1, 3 (node0, node1)`."""
    nodes = list(dict.fromkeys(rank.node.node for rank in ranks))
    numbers = fold_numbers([rank.rank for rank in ranks])
    names = f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
    return f"{names} on {nodes[0]}" if len(nodes) == 1 else f"{names} ({', '.join(nodes)})"


def _others(every: _Ranks, blamed: _Ranks) -> str:
    """`; the other 3 ranks wait in all_reduce`; empty where that is not known."""
    others = [rank for rank in every if rank not in blamed]
    names = [rank.waits_in for rank in others if rank.waits_in is not None]
    if not names:
        return ""
    (name, count), *more = collections.Counter(names).most_common()
    if count < len(others):
        who = f"{count} of the other {len(others)} ranks {'waits' if count == 1 else 'wait'}"
    else:
        who = "the other rank waits" if count == 1 else f"the other {count} ranks wait"
    return f"; {who} in {name}{' and others elsewhere' if more else ''}"


def _behind(every: _Ranks, blamed: _Ranks) -> str:
    """`, at step 41 where the others have done 42`; empty where they do not differ."""
    steps = {rank.step for rank in blamed}
    others = {rank.step for rank in every if rank not in blamed}
    if len(steps) != 1 or len(others) != 1 or steps == others or None in steps | others:
        return ""
    return f", at step {steps.pop()} while the others finished {others.pop()}"


def _busy(rank: RankState) -> str:
    process = rank.process
    if process is None or process.cpu_s is None or not process.looked_s:
        return ""
    return ", using CPU" if process.cpu_s / process.looked_s >= _SPINS else ", idle"
