"""A hang in words: from the code and facts of `diagnose.hang` to the sentence that names a cause, and its hint."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence

import msgspec

from multinode.diagnose.failure_kinds import told_by_nccl
from multinode.diagnose.hang import Hang, RankState
from multinode.records.run import NodeDiagnosis, StallCause

_SPINS = 0.5  # share of a processor from which on a process is said to compute
_MOST_FRAMES = 20


class _Words(msgspec.Struct, frozen=True):
    """A cause: what follows the names of the ranks that are to blame, or a sentence where none is; and the hint."""

    text: str
    hint: str


def stall_cause(hang: Hang, nodes: Sequence[NodeDiagnosis] = ()) -> StallCause:
    """The cause in words: the first of the ranks that were found is to blame; the others are told where they wait.

    `nodes` is what they said: where no rank is to blame, what NCCL warned of is the hint.
    """
    words = _WORDS[hang.code](hang)
    if hang.code in _OF_NETWORK:
        words = _Words(words.text, "; ".join([*_nccl_hints(nodes), words.hint]))
    cause = StallCause(code=hang.code, message=words.text, hint=words.hint)
    if hang.found:
        first = hang.found[0]
        stack = (f"{frame.path}:{frame.line} in {frame.name}" for frame in first.frames[:_MOST_FRAMES])
        others = _all_wait(hang.ranks) if hang.connection is not None else _others(hang)
        return msgspec.structs.replace(
            cause,
            message=f"{_names(hang.found)} {words.text}{others}",
            node=first.node.node,
            node_rank=first.node.node_rank,
            rank=first.rank,
            stack="\n".join(stack),
        )
    if hang.node is not None:
        return msgspec.structs.replace(cause, node=hang.node.node, node_rank=hang.node.node_rank)
    return cause


# What may come of the network, or of NCCL's settings.
_OF_NETWORK = frozenset({"no_workers", "connection", "all_wait", "same_place", "unknown"})


def _nccl_hints(nodes: Sequence[NodeDiagnosis]) -> Iterator[str]:
    for node in nodes:
        warning = told_by_nccl(node.nccl_warnings)
        if warning is not None and warning.error is not None:
            yield f"NCCL on {node.node} warns: {warning.text}: {warning.error.fix.replace('{node}', node.node)}"
            return


def _stopped(hang: Hang) -> _Words:
    found, first = hang.found, hang.found[0]
    pids = " ".join(str(one.pid) for one in found if one.node is first.node)
    return _Words(
        f"{_are(found)} stopped (state T) by SIGSTOP",
        f"resume it, on {first.node.node}: kill -CONT {pids}",
    )


def _traced(hang: Hang) -> _Words:
    first = hang.found[0]
    return _Words(
        f"{_are(hang.found)} held by a debugger (state t)",
        f"close the debugger, or resume the process; it traces pid {first.pid} on {first.node.node}",
    )


def _launcher_stopped(hang: Hang) -> _Words:
    node, process = _name(hang), hang.process
    command, pid = (process.command, process.pid) if process is not None else (None, None)
    return _Words(
        f"the launcher on {node} ({command}, pid {pid}) is stopped (state T) by SIGSTOP",
        f"resume it, on {node}: kill -CONT {pid}",
    )


def _no_workers(_: Hang) -> _Words:
    return _Words(
        "no worker has started on any node: the launchers are waiting for each other",
        "a port between the nodes may be closed, or they disagree on the rendezvous: multinode check",
    )


def _gone(hang: Hang) -> _Words:
    steps = {one.step for one in hang.found if one.step is not None}
    after = f" after step {steps.pop()}" if len(steps) == 1 else ""
    who = "it" if len(hang.found) == 1 else "they"
    return _without_process(hang, f"no process left: {who} ended{after}")


def _never_there(hang: Hang) -> _Words:
    return _without_process(hang, "no process: it was not started or has ended")


def _without_process(hang: Hang, what: str) -> _Words:
    has = "has" if len(hang.found) == 1 else "have"
    return _Words(f"{has} {what}", f"see its last lines: multinode logs last --node {hang.found[0].node.node}")


def _uninterruptible(hang: Hang) -> _Words:
    first = hang.found[0]
    where = f", in {first.process.wchan}" if first.process and first.process.wchan else ""
    return _Words(
        f"{_are(hang.found)} in uninterruptible sleep (state D{where}): a disk, a network file system or a driver on "
        "that node does not answer",
        f"kernel messages, on {first.node.node}: dmesg -T | tail; df -h",
    )


def _silent_node(hang: Hang) -> _Words:
    error = hang.node.error if hang.node is not None else None
    return _Words(
        f"{_name(hang)} did not report what its ranks are doing: {error}",
        (f"see whether it is up: ssh {_name(hang)} uptime"),
    )


def _fewer_collectives(hang: Hang) -> _Words:
    return _late(hang, f"launched {hang.count} collectives while others launched {hang.most}")


def _fewer_operations(hang: Hang) -> _Words:
    text = f"launched {hang.count} {hang.operation} operations while another launched {hang.most}"
    return _late(hang, f"{text} (NCCL RAS)")


def _late(hang: Hang, text: str) -> _Words:
    where = hang.found[0].where
    place = f", and is in {where.waits_in or where.place}" if where is not None else ""
    has = "has" if len(hang.found) == 1 else "have"
    return _Words(f"{has} {text}{place}", "its full stack is in stall.json")


def _elsewhere(hang: Hang) -> _Words:
    first = hang.found[0]
    place = first.where.place if first.where is not None else ""
    return _Words(
        f"{_are(hang.found)} in {place}{_busy(first)}{_behind(hang)}",
        "its full stack is in stall.json; if it is only slow, set a longer --hang-timeout",
    )


def _disagreement(hang: Hang) -> _Words:
    where = hang.found[0].where
    return _Words(
        f"{_wait(hang.found)} in {where.waits_in if where is not None else ''}{_behind(hang)}",
        "every rank must call the same collectives in the same order; see where each one is in stall.json",
    )


def _fewer_steps(hang: Hang) -> _Words:
    first = hang.found[0]
    where = f" and waits in {first.where.waits_in}" if first.where is not None and first.waits else ""
    return _Words(
        f"{_are(hang.found)} behind at step {hang.count} of {hang.most}{where}", "its position is in stall.json"
    )


def _connection(hang: Hang) -> _Words:
    peer = hang.connection
    how = ""
    if peer is not None and peer.state == "connecting":
        how = f"cannot connect to {peer.peer}"
    elif peer is not None:
        how = f"cannot deliver {peer.send_queue_bytes} bytes to {peer.peer}"
    return _Words(how, "test the network between the nodes: multinode check")


def _all_waiting(hang: Hang) -> _Words:
    where = hang.ranks[0].where
    return _Words(
        f"all {len(hang.ranks)} ranks wait in {where.waits_in if where is not None else ''}, and none is behind",
        "test the network between the nodes and the backend: multinode check",
    )


def _same_place(hang: Hang) -> _Words:
    where = hang.ranks[0].where
    return _Words(
        f"all {len(hang.ranks)} ranks are in {where.place if where is not None else ''}",
        "if this is only slow, set a longer --hang-timeout",
    )


def _unknown(hang: Hang) -> _Words:
    unknown = [one for one in hang.ranks if one.where is None]
    reason = next((one.process.stack_missing for one in unknown if one.process and one.process.stack_missing), None)
    why = f" ({_names(unknown)} returned no stack: {reason})" if reason else ""
    return _Words(
        f"state, stack and steps show no rank that is behind{why}", "see what each process is doing in stall.json"
    )


_WORDS: dict[str, Callable[[Hang], _Words]] = {
    "stopped": _stopped,
    "traced": _traced,
    "launcher_stopped": _launcher_stopped,
    "no_workers": _no_workers,
    "gone": _gone,
    "never_there": _never_there,
    "uninterruptible": _uninterruptible,
    "silent_node": _silent_node,
    "fewer_collectives": _fewer_collectives,
    "fewer_operations": _fewer_operations,
    "elsewhere": _elsewhere,
    "disagreement": _disagreement,
    "fewer_steps": _fewer_steps,
    "connection": _connection,
    "all_wait": _all_waiting,
    "same_place": _same_place,
    "unknown": _unknown,
}


def _name(hang: Hang) -> str:
    return hang.node.node if hang.node is not None else ""


def _names(found: Sequence[RankState]) -> str:
    """`rank 3 on node1`, `ranks 2, 3 on node1`, `ranks 1, 3 (node0, node1)`."""
    nodes = list(dict.fromkeys(one.node.node for one in found))
    numbers = ", ".join(str(one.rank) for one in found)
    ranks = f"rank {numbers}" if len(found) == 1 else f"ranks {numbers}"
    return f"{ranks} on {nodes[0]}" if len(nodes) == 1 else f"{ranks} ({', '.join(nodes)})"


def _others(hang: Hang) -> str:
    """`; the other 3 ranks wait in all_reduce`; empty where that is not known."""
    others = [one for one in hang.ranks if one not in hang.found]
    words = [one.where.waits_in for one in others if one.where is not None and one.where.waits_in is not None]
    if not words:
        return ""
    (word, count), *more = collections.Counter(words).most_common()
    if count < len(others):
        who = f"{count} of the other {len(others)} ranks {'waits' if count == 1 else 'wait'}"
    else:
        who = "the other rank waits" if count == 1 else f"the other {count} ranks wait"
    return f"; {who} in {word}{' and others elsewhere' if more else ''}"


def _all_wait(ranks: Sequence[RankState]) -> str:
    words = {one.where.waits_in for one in ranks if one.where is not None}
    return f"; all {len(ranks)} ranks wait in {words.pop()}" if len(words) == 1 and None not in words else ""


def _behind(hang: Hang) -> str:
    """`, at step 41 where the others have done 42`; empty where they do not differ."""
    mine = {one.step for one in hang.found}
    theirs = {one.step for one in hang.ranks if one not in hang.found}
    if len(mine) != 1 or len(theirs) != 1 or mine == theirs or None in mine | theirs:
        return ""
    return f", at step {mine.pop()} while the others finished {theirs.pop()}"


def _busy(one: RankState) -> str:
    process = one.process
    if process is None or process.cpu_s is None or not process.looked_s:
        return ""
    return ", using CPU" if process.cpu_s / process.looked_s >= _SPINS else ", idle"


def _are(found: Sequence[RankState]) -> str:
    return "is" if len(found) == 1 else "are"


def _wait(found: Sequence[RankState]) -> str:
    return "waits" if len(found) == 1 else "wait"
