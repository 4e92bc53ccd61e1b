"""find_hang: from what all nodes said of a run that hangs, which rank is behind and why, as a code and facts. Pure.

Knows states, stacks, steps and queues; the words are `launch.hang_words`', and what is done is not decided here.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from multinode.records.run import Connection, NodeDiagnosis, ProcessDiagnosis

# CPython's faulthandler:   File "/home/a/train.py", line 12 in main
_FAULTHANDLER = re.compile(r'^  File "(?P<path>[^"]*)", line (?P<line>\d+|\?\?\?) in (?P<name>.+)$')
# py-spy dump:     main (train.py:12)
_PY_SPY = re.compile(r"^    (?P<name>\S.*) \((?P<path>.*?)(?::(?P<line>\d+))?\)$")
_THREAD = re.compile(r"^(?:Current thread|Thread) ")
# py-spy shortens paths by what stands on sys.path.
_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib/python\d|^<frozen|multinode_agent/|^(?:torch|transformers|accelerate|deepspeed)/"
)
_COLLECTIVE_FILES = re.compile(
    r"torch/distributed/(?:distributed_c10d|rendezvous|_functional_collectives)|deepspeed/comm/"
)
_BACKWARD_FILES = re.compile(r"torch/autograd/|torch/_tensor\.py$")
_SYNCHRONIZE_FILES = re.compile(r"torch/(?:cuda|accelerator|xpu|npu)/")
_CONSTRUCTOR = re.compile(r"torch/nn/parallel/distributed\.py$")


class Frame(msgspec.Struct, frozen=True):
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


class Standpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker's main thread stands."""

    # the collective, `backward` or `synchronize`: what cannot end before the other ranks get there
    waits_in: str | None
    place: str  # the call in words, for a worker that waits in none of these


def parse_main_thread(stack: str) -> tuple[Frame, ...]:
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
    return tuple(Frame(match["path"], match["line"] or "?", match["name"]) for match in matches if match is not None)


def standpoint(frames: tuple[Frame, ...]) -> Standpoint | None:
    """Where these frames, innermost first, stand; None without frames."""
    if not frames:
        return None
    return Standpoint(waits_in=_waits_in(frames), place=_place(frames))


def _waits_in(frames: tuple[Frame, ...]) -> str | None:
    collective = [frame.function for frame in frames if _COLLECTIVE_FILES.search(frame.path)]
    # The innermost function of the interface: wrappers and private ones stand on either side of it.
    for name in collective:
        if not name.startswith("_") and name not in {"wrapper", "inner"}:
            return name
    for pattern, word in (
        (_BACKWARD_FILES, "backward"),
        (_SYNCHRONIZE_FILES, "synchronize"),
        (_CONSTRUCTOR, "the start of DistributedDataParallel"),
    ):
        if any(pattern.search(frame.path) and _fits(frame.function, word) for frame in frames):
            return word
    return None


def _fits(name: str, word: str) -> bool:
    return name == "__init__" if word.startswith("the start") else name in {word, "_engine_run_backward"}


def _place(frames: tuple[Frame, ...]) -> str:
    own = next((frame for frame in frames if not _LIBRARY.search(frame.path)), None)
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
    found: list[LaggingRank] = []
    operation: str | None = None
    counts: list[int] = []
    listed: list[tuple[int, int | None, int]] = []

    def close() -> None:
        if operation is not None and counts:
            fewest, most = min(counts), max(counts)
            behind = [one for one in listed if one[2] == fewest < most]
            found.extend(LaggingRank(rank, pid, operation, count, most) for rank, pid, count in behind)

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
    return tuple(found)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None else None


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """One worker that should be there."""

    rank: int
    node: NodeDiagnosis
    process: ProcessDiagnosis | None
    frames: tuple[Frame, ...]
    where: Standpoint | None
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
    def waits(self) -> bool:
        """Whether it stands in a collective."""
        return self.where is not None and self.where.waits_in is not None


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """What was found."""

    # `stopped`, `traced`, `gone`, `never_there`, `no_workers`, `uninterruptible`, `launcher_stopped`, `silent_node`,
    # `elsewhere`, `fewer_collectives`, `fewer_operations` (of NCCL), `disagreement` (on which collective comes),
    # `fewer_steps`, `connection`; without any of these `all_wait`, `same_place` or `unknown`
    code: str
    ranks: tuple[RankState, ...]  # all that should be there, of the nodes that answered
    found: tuple[RankState, ...] = ()  # of these the ranks to blame; empty blames none
    node: NodeDiagnosis | None = None  # to blame where no rank is; `process` the launcher on it that is stopped
    process: ProcessDiagnosis | None = None
    count: int | None = None  # collectives, operations or steps of `found`; `most` those of others
    most: int | None = None
    operation: str | None = None  # whose count it is, in NCCL's words
    connection: Connection | None = None  # on which nothing gets through


_Nodes = Sequence[NodeDiagnosis]
_Ranks = tuple[RankState, ...]


def find_hang(nodes: _Nodes) -> Hang:
    """Say which rank is behind.

    The surest sign decides: a worker that is stopped; one that is gone; one that the kernel holds; a node that does not
    answer; one worker outside of any collective while others wait in one, where the host waits for its collectives;
    one that launched fewer collectives than others, by their own counts or NCCL's; workers in different collectives;
    one with fewer steps than the rest; a connection on which nothing gets through. Without any of these nobody is
    blamed.
    """
    ranks = tuple(_rank(node, number) for node in nodes if node.error is None for number in node.ranks)
    found = (hang for find in _CAUSES if (hang := find(nodes, ranks)) is not None)
    return next(found, None) or _unexplained(ranks)


def _rank(node: NodeDiagnosis, number: int) -> RankState:
    process = next((process for process in node.processes if process.rank == number), None)
    frames = parse_main_thread(process.stack) if process is not None and process.stack else ()
    step = next((last.step for last in node.last_steps if last.rank == number), None)
    return RankState(rank=number, node=node, process=process, frames=frames, where=standpoint(frames), step=step)


def _blame(code: str, ranks: _Ranks, found: Sequence[RankState]) -> Hang | None:
    return Hang(code=code, ranks=ranks, found=tuple(found)) if found else None


def _stopped(_: _Nodes, ranks: _Ranks) -> Hang | None:
    found = [one for one in ranks if one.state in {"T", "t"}]
    return _blame("traced" if found and found[0].state == "t" else "stopped", ranks, found)


def _launcher_stopped(nodes: _Nodes, ranks: _Ranks) -> Hang | None:
    for node in nodes:
        for process in node.processes:
            if process.role == "launcher" and process.state == "T":
                return Hang(code="launcher_stopped", ranks=ranks, node=node, process=process)
    return None


def _gone(_: _Nodes, ranks: _Ranks) -> Hang | None:
    found = [one for one in ranks if one.state in {None, "Z", "X"}]
    if found and len(found) == len(ranks) and all(one.step is None for one in found):
        return Hang(code="no_workers", ranks=ranks)
    never = all(one.state is None and one.step is None for one in found)
    return _blame("never_there" if never else "gone", ranks, found)


def _uninterruptible(_: _Nodes, ranks: _Ranks) -> Hang | None:
    # Twice in a row: a moment of it belongs to every disk access.
    found = [one for one in ranks if one.process and one.process.state == one.process.state_before == "D"]
    return _blame("uninterruptible", ranks, found)


def _silent_node(nodes: _Nodes, ranks: _Ranks) -> Hang | None:
    silent = next((node for node in nodes if node.error is not None), None)
    return Hang(code="silent_node", ranks=ranks, node=silent) if silent is not None else None


def _fewest_collectives(_: _Nodes, ranks: _Ranks) -> Hang | None:
    counts = [one.process.collectives if one.process is not None else None for one in ranks]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts) or len(set(known)) < 2:  # noqa: PLR2004 - all have launched as many
        return None
    fewest = min(known)
    found = tuple(one for one, count in zip(ranks, known, strict=True) if count == fewest)
    return Hang(code="fewer_collectives", ranks=ranks, found=found, count=fewest, most=max(known))


def _lagging_in_nccl(nodes: _Nodes, ranks: _Ranks) -> Hang | None:
    for node in nodes:
        for lag in find_lagging(node.ras) if node.ras else ():
            same = tuple(one for one in ranks if lag.pid is not None and one.pid == lag.pid)
            if len(same) == 1:
                return Hang(
                    code="fewer_operations",
                    ranks=ranks,
                    found=same,
                    count=lag.launched,
                    most=lag.most,
                    operation=lag.operation,
                )
    return None


def _elsewhere(_: _Nodes, ranks: _Ranks) -> Hang | None:
    """Some ranks stand outside of what the others wait in.

    With GPUs that is no sign: the host launches a collective and goes on, to block wherever it reads a result.
    """
    found = [one for one in ranks if one.where is not None and not one.waits]
    on_gpu = any(one.process is not None and one.process.gpu for one in ranks)
    return None if on_gpu or not any(one.waits for one in ranks) else _blame("elsewhere", ranks, found)


def _disagreement(_: _Nodes, ranks: _Ranks) -> Hang | None:
    words = collections.Counter(one.where.waits_in for one in ranks if one.where is not None and one.waits)
    if len(words) < 2 or sum(words.values()) < len(ranks):  # noqa: PLR2004 - two make a disagreement
        return None
    rarest = min(words, key=lambda word: (words[word], str(word)))
    return _blame("disagreement", ranks, [one for one in ranks if one.where and one.where.waits_in == rarest])


def _fewest_steps(_: _Nodes, ranks: _Ranks) -> Hang | None:
    steps = [one.step or 0 for one in ranks]
    if not steps or min(steps) == max(steps):
        return None
    found = tuple(one for one in ranks if (one.step or 0) == min(steps))
    return Hang(code="fewer_steps", ranks=ranks, found=found, count=min(steps), most=max(steps))


def _connection(_: _Nodes, ranks: _Ranks) -> Hang | None:
    for one in ranks:
        for peer in one.process.sockets.listed if one.process and one.process.sockets else ():
            if peer.state == "connecting" or peer.send_queue_bytes:
                return Hang(code="connection", ranks=ranks, found=(one,), connection=peer)
    return None


_CAUSES: tuple[Callable[[_Nodes, _Ranks], Hang | None], ...] = (
    _stopped,
    _gone,
    _uninterruptible,
    _launcher_stopped,
    _silent_node,
    _elsewhere,
    _fewest_collectives,
    _lagging_in_nccl,
    _disagreement,
    _fewest_steps,
    _connection,
)


def _unexplained(ranks: _Ranks) -> Hang:
    words = {one.where.waits_in for one in ranks if one.where is not None and one.waits}
    if len(words) == 1 and all(one.waits for one in ranks):
        return Hang(code="all_wait", ranks=ranks)
    places = {one.where.place for one in ranks if one.where is not None}
    is_one = len(places) == 1 and all(one.where is not None for one in ranks)
    return Hang(code="same_place" if is_one else "unknown", ranks=ranks)
