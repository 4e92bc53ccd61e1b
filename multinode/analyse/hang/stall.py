"""explain_stall: from what all nodes said of a run that hangs, which rank is behind and why. Pure.

Knows states, stacks, steps and queues; what is done about it is not decided here.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

import msgspec

from multinode.analyse.hang.nccl_ras import find_lagging
from multinode.analyse.hang.stacks import Frame, Standpoint, parse_main_thread, standpoint
from multinode.core.run.run import NodeDiagnosis, ProcessDiagnosis, StallCause

__all__ = ["explain_stall"]

_SPINS = 0.5  # share of a processor from which on a process is said to compute
_MOST_FRAMES = 20


class _Rank(msgspec.Struct, frozen=True, kw_only=True):
    """One worker that should be there."""

    rank: int
    node: NodeDiagnosis
    process: ProcessDiagnosis | None
    frames: tuple[Frame, ...]
    where: Standpoint | None
    step: int | None

    @property
    def state(self) -> str | None:
        return self.process.state if self.process is not None else None

    @property
    def waits(self) -> bool:
        return self.where is not None and self.where.waits_in is not None


def explain_stall(nodes: Sequence[NodeDiagnosis]) -> StallCause:
    """Say which rank is behind.

    The surest sign decides: a worker that is stopped; one that is gone; one that the kernel holds; a node that does not
    answer; one worker outside of any collective while others wait in one, where the host waits for its collectives;
    one that launched fewer collectives than others, by their own counts or NCCL's; workers in different collectives;
    one with fewer steps than the rest; a connection on which nothing gets through. Without any of these nobody is
    blamed.
    """
    ranks = [_rank(node, number) for node in nodes if node.error is None for number in node.ranks]
    found = (explanation for explain in _CAUSES if (explanation := explain(nodes, ranks)) is not None)
    return next(found, None) or _unexplained(ranks)


def _rank(node: NodeDiagnosis, number: int) -> _Rank:
    process = next((process for process in node.processes if process.rank == number), None)
    frames = parse_main_thread(process.stack) if process is not None and process.stack else ()
    step = next((last.step for last in node.last_steps if last.rank == number), None)
    return _Rank(rank=number, node=node, process=process, frames=frames, where=standpoint(frames), step=step)


def _stopped(_: Sequence[NodeDiagnosis], ranks: Sequence[_Rank]) -> StallCause | None:
    found = [one for one in ranks if one.state in {"T", "t"}]
    if not found:
        return None
    first = found[0]
    if first.state == "t":
        cause = "held by a debugger (state t)"
        hint = f"end the debugger, or resume the process; it traces pid {_pid(first)} on {first.node.node}"
    else:
        cause = "stopped (state T): somebody sent {} SIGSTOP".format("it" if len(found) == 1 else "them")
        pids = " ".join(str(_pid(one)) for one in found if one.node is first.node)
        hint = f"resume it, on {first.node.node}: kill -CONT {pids}"
    return _blame(ranks, found, f"{_are(found)} {cause}", hint)


def _launcher_stopped(nodes: Sequence[NodeDiagnosis], _: Sequence[_Rank]) -> StallCause | None:
    for node in nodes:
        for process in node.processes:
            if process.role == "launcher" and process.state == "T":
                return StallCause(
                    message=f"the launcher on {node.node} ({process.command}, pid {process.pid}) is stopped (state T): "
                    "somebody sent it SIGSTOP",
                    hint=f"resume it, on {node.node}: kill -CONT {process.pid}",
                    node=node.node,
                    node_rank=node.node_rank,
                )
    return None


def _gone(_: Sequence[NodeDiagnosis], ranks: Sequence[_Rank]) -> StallCause | None:
    found = [one for one in ranks if one.state in {None, "Z", "X"}]
    if not found:
        return None
    first = found[0]
    if len(found) == len(ranks) and all(one.step is None for one in found):
        return StallCause(
            message="no worker has started on any node: the launchers wait for each other",
            hint="a port between the nodes may be closed, or they disagree on the rendezvous: multinode check",
        )
    never = all(one.state is None and one.step is None for one in found)
    ended = "no process any more: it ended" if len(found) == 1 else "no process any more: they ended"
    cause = "no process: it was not started, or is gone" if never else ended + _after(found)
    has = "has" if len(found) == 1 else "have"
    return _blame(ranks, found, f"{has} {cause}", f"its last words: multinode logs last --node {first.node.node}")


def _uninterruptible(_: Sequence[NodeDiagnosis], ranks: Sequence[_Rank]) -> StallCause | None:
    # Twice in a row: a moment of it belongs to every disk access.
    found = [one for one in ranks if one.process and one.process.state == one.process.state_before == "D"]
    if not found:
        return None
    first = found[0]
    where = f", in {first.process.wchan}" if first.process and first.process.wchan else ""
    text = (
        f"{_are(found)} in uninterruptible sleep (state D{where}): a disk, a network file system or a driver on that "
        "node does not answer"
    )
    return _blame(ranks, found, text, f"what the kernel says, on {first.node.node}: dmesg -T | tail; df -h")


def _silent_node(nodes: Sequence[NodeDiagnosis], _: Sequence[_Rank]) -> StallCause | None:
    silent = next((node for node in nodes if node.error is not None), None)
    if silent is None:
        return None
    return StallCause(
        message=f"{silent.node} could not be asked what its ranks do: {silent.error}",
        hint=f"is it alive? try: ssh {silent.node} uptime",
        node=silent.node,
        node_rank=silent.node_rank,
    )


def _fewest_collectives(_: Sequence[NodeDiagnosis], ranks: Sequence[_Rank]) -> StallCause | None:
    """Some ranks have launched fewer collectives than others, by the counts of their process groups."""
    counts = [one.process.collectives if one.process is not None else None for one in ranks]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts) or len(set(known)) < 2:  # noqa: PLR2004 - all have launched as many
        return None
    fewest = min(known)
    found = [one for one, count in zip(ranks, known, strict=True) if count == fewest]
    return _late(ranks, found, f"has launched {fewest} collectives where others have launched {max(known)}")


def _lagging_in_nccl(nodes: Sequence[NodeDiagnosis], ranks: Sequence[_Rank]) -> StallCause | None:
    """The same by NCCL's counts, which are those of one communicator and so know its ranks, not ours."""
    for node in nodes:
        for lag in find_lagging(node.ras) if node.ras else ():
            same = [one for one in ranks if lag.pid is not None and _pid(one) == lag.pid]
            if len(same) == 1:
                text = f"has launched {lag.launched} {lag.operation} operations where another has launched {lag.most}"
                return _late(ranks, same, f"{text} (NCCL RAS)")
    return None


def _late(ranks: Sequence[_Rank], found: Sequence[_Rank], text: str) -> StallCause:
    where = found[0].where
    place = f", and is in {where.waits_in or where.place}" if where is not None else ""
    words = text if len(found) == 1 else text.replace("has launched", "have launched", 1)
    return _blame(ranks, found, f"{words}{place}", "its whole stack is in stall.json")


def _elsewhere(_: Sequence[NodeDiagnosis], ranks: Sequence[_Rank]) -> StallCause | None:
    """Some ranks stand outside of what the others wait in.

    With GPUs that is no sign: the host launches a collective and goes on, to block wherever it reads a result.
    """
    found = [one for one in ranks if one.where is not None and not one.waits]
    on_gpu = any(one.process is not None and one.process.gpu for one in ranks)
    if on_gpu or not found or not any(one.waits for one in ranks):
        return None
    first = found[0]
    place = first.where.place if first.where is not None else ""
    hint = "its whole stack is in stall.json; where it is only slow, give a longer --hang-timeout"
    return _blame(ranks, found, f"{_are(found)} in {place}{_busy(first)}{_behind(ranks, found)}", hint)


def _disagreement(_: Sequence[NodeDiagnosis], ranks: Sequence[_Rank]) -> StallCause | None:
    """All wait, and not in the same thing."""
    words = collections.Counter(one.where.waits_in for one in ranks if one.where is not None and one.waits)
    if len(words) < 2 or sum(words.values()) < len(ranks):  # noqa: PLR2004 - two make a disagreement
        return None
    rarest = min(words, key=lambda word: (words[word], str(word)))
    found = [one for one in ranks if one.where is not None and one.where.waits_in == rarest]
    hint = "every rank must come to the same collectives in the same order; see where each stands in stall.json"
    return _blame(ranks, found, f"{_wait(found)} in {rarest}{_behind(ranks, found)}", hint)


def _fewest_steps(_: Sequence[NodeDiagnosis], ranks: Sequence[_Rank]) -> StallCause | None:
    steps = [one.step or 0 for one in ranks]
    if not steps or min(steps) == max(steps):
        return None
    found = [one for one in ranks if (one.step or 0) == min(steps)]
    first = found[0]
    where = f" and {_wait([first])} in {first.where.waits_in}" if first.where is not None and first.waits else ""
    text = f"{_are(found)} behind at step {min(steps)} of {max(steps)}{where}"
    return _blame(ranks, found, text, "where it stands is in stall.json")


def _connection(_: Sequence[NodeDiagnosis], ranks: Sequence[_Rank]) -> StallCause | None:
    """All are at the same point, and a connection carries nothing."""
    for one in ranks:
        for peer in one.process.sockets.listed if one.process and one.process.sockets else ():
            if peer.state == "connecting":
                how = f"tries to connect to {peer.peer} in vain"
            elif peer.send_queue_bytes:
                how = f"has {peer.send_queue_bytes} bytes for {peer.peer} that do not get through"
            else:
                continue
            return _blame((), [one], f"{how}{_all_wait(ranks)}", "the network between the nodes: multinode check")
    return None


_CAUSES: tuple[Callable[[Sequence[NodeDiagnosis], Sequence[_Rank]], StallCause | None], ...] = (
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


def _unexplained(ranks: Sequence[_Rank]) -> StallCause:
    words = {one.where.waits_in for one in ranks if one.where is not None and one.waits}
    if len(words) == 1 and all(one.waits for one in ranks):
        message = f"all {len(ranks)} ranks wait in {words.pop()}, and none is behind"
        return StallCause(message=message, hint="the network between the nodes, or the backend: multinode check")
    places = {one.where.place for one in ranks if one.where is not None}
    if len(places) == 1 and all(one.where is not None for one in ranks):
        return StallCause(
            message=f"all {len(ranks)} ranks are in {places.pop()}",
            hint="where this only takes long, give a longer --hang-timeout",
        )
    unknown = [one for one in ranks if one.where is None]
    reason = next((one.process.stack_missing for one in unknown if one.process and one.process.stack_missing), None)
    why = f" ({_names(unknown)} could not show a stack: {reason})" if reason else ""
    return StallCause(
        message=f"no rank is behind by its state, its stack or its steps{why}",
        hint="what each process does is in stall.json",
    )


def _blame(ranks: Sequence[_Rank], found: Sequence[_Rank], text: str, hint: str) -> StallCause:
    """The first of those that were found is to blame; of `ranks` the others are told where they wait."""
    one = found[0]
    return StallCause(
        message=f"{_names(found)} {text}{_others(ranks, found)}",
        hint=hint,
        node=one.node.node,
        node_rank=one.node.node_rank,
        rank=one.rank,
        stack="\n".join(f"{frame.path}:{frame.line} in {frame.name}" for frame in one.frames[:_MOST_FRAMES]),
    )


def _pid(one: _Rank) -> int | None:
    return one.process.pid if one.process is not None else None


def _names(found: Sequence[_Rank]) -> str:
    """`rank 3 on node1`, `ranks 2, 3 on node1`, `ranks 1, 3 (node0, node1)`."""
    nodes = list(dict.fromkeys(one.node.node for one in found))
    numbers = ", ".join(str(one.rank) for one in found)
    ranks = f"rank {numbers}" if len(found) == 1 else f"ranks {numbers}"
    return f"{ranks} on {nodes[0]}" if len(nodes) == 1 else f"{ranks} ({', '.join(nodes)})"


def _others(ranks: Sequence[_Rank], found: Sequence[_Rank]) -> str:
    """`; the other 3 ranks wait in all_reduce`; empty where that is not known."""
    others = [one for one in ranks if one not in found]
    words = [one.where.waits_in for one in others if one.where is not None and one.where.waits_in is not None]
    if not words:
        return ""
    (word, count), *more = collections.Counter(words).most_common()
    if count < len(others):
        who = f"{count} of the other {len(others)} ranks {'waits' if count == 1 else 'wait'}"
    else:
        who = "the other rank waits" if count == 1 else f"the other {count} ranks wait"
    return f"; {who} in {word}{' and others elsewhere' if more else ''}"


def _all_wait(ranks: Sequence[_Rank]) -> str:
    words = {one.where.waits_in for one in ranks if one.where is not None}
    return f"; all {len(ranks)} ranks wait in {words.pop()}" if len(words) == 1 and None not in words else ""


def _after(found: Sequence[_Rank]) -> str:
    steps = {one.step for one in found if one.step is not None}
    return f" after step {steps.pop()}" if len(steps) == 1 else ""


def _behind(ranks: Sequence[_Rank], found: Sequence[_Rank]) -> str:
    """`, at step 41 where the others have done 42`; empty where they do not differ."""
    mine = {one.step for one in found}
    theirs = {one.step for one in ranks if one not in found}
    if len(mine) != 1 or len(theirs) != 1 or mine == theirs or None in mine | theirs:
        return ""
    return f", at step {mine.pop()} where the others have done {theirs.pop()}"


def _busy(one: _Rank) -> str:
    process = one.process
    if process is None or process.cpu_s is None or not process.looked_s:
        return ""
    return ", using CPU" if process.cpu_s / process.looked_s >= _SPINS else ", idle"


def _are(found: Sequence[_Rank]) -> str:
    return "is" if len(found) == 1 else "are"


def _wait(found: Sequence[_Rank]) -> str:
    return "waits" if len(found) == 1 else "wait"
