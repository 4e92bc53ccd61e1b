"""Logs and samples of an ended run that could not be stored while it ran: fetched from its nodes. Prints nothing."""

from __future__ import annotations

import time

from msgspec.structs import replace

from multinode.cluster.cluster import Cluster
from multinode.errors import ContactLost, MultinodeError
from multinode.launch.context import RunContext
from multinode.launch.session import Chunk, EventQueue, Gone, NodeSession
from multinode.launch.tracker import KeptFiles, KeptLimits
from multinode.records.run import Run, node_run_id
from multinode.runs.stored_run import StoredRun

_TICK_S = 0.2
_POLL_S = 0.1
# A node that sends nothing for this long is not waited for.
_SILENCE_S = 30.0


def fetch_missing(stored: StoredRun, run: Run, cluster: Cluster, context: RunContext) -> Run:
    """Fetch what an ended run misses from the nodes that have ended it, and record what is still missing.

    `context.say` is told what cannot be fetched; a request to stop ends it. `cluster` has the nodes in node-rank order.

    Raises:
        MultinodeError: the record cannot be written.
    """
    directory, places = stored.directory, stored.require_plan().places
    directory.restore()
    ranks = [node.node_rank for node in run.nodes if node.state == "ended" and node.status.cause != "not_started"]
    files = {rank: KeptFiles(directory, places[rank], KeptLimits()) for rank in ranks}
    before = _stored_bytes(files)
    events = EventQueue()
    sessions = [
        NodeSession(
            agent=context.agent,
            node=cluster.nodes[rank],
            node_rank=rank,
            request={"run_id": node_run_id(run.run_id, rank), "poll_s": _POLL_S},
            events=events,
            silence_s=_SILENCE_S,
            have=kept.offsets,
        )
        for rank, kept in files.items()
    ]
    for session in sessions:
        session.start()
    try:
        failed = _take_all(files, events, context)
    finally:
        for session in sessions:
            session.leave()
    for node in run.nodes:
        kept = files.get(node.node_rank)
        error = failed.get(node.node_rank) or (kept.trouble if kept is not None else None)
        if kept is None:
            context.say(f"{node.name} was lost or not started, so nothing is fetched from it")
        elif error is not None:
            context.say(f"{node.name}: its log and samples were fetched only in part: {error.message}")
    missing = sum(kept.missing_bytes for kept in files.values())
    if failed or len(files) < len(run.nodes):
        # The record has one number for all nodes, so what those miss is what the others have not sent.
        missing = max(missing, run.missing_bytes - (_stored_bytes(files) - before))
    run = replace(run, missing_bytes=missing)
    directory.write("run.json", run)
    return run


def _take_all(files: dict[int, KeptFiles], events: EventQueue, context: RunContext) -> dict[int, MultinodeError]:
    """Store what the nodes send, to the end of each; by node rank, why some did not get there."""
    left, errors = set(files), dict[int, MultinodeError]()
    due = time.monotonic() + _SILENCE_S
    while left and time.monotonic() < due and not context.stop.count:
        for event in events.take(_TICK_S):
            message, kept = event.message, files[event.node_rank]
            if event.error is not None:
                errors[event.node_rank] = event.error
            if isinstance(message, Chunk):
                kept.take(message.file, message.offset, message.data)
            elif isinstance(message, Gone):
                kept.skip(message.offset, message.size_bytes)
            if message is not None:
                due = time.monotonic() + _SILENCE_S
            if event.over:
                left.discard(event.node_rank)
                if event.error is None:
                    errors.pop(event.node_rank, None)
    unfinished = ContactLost("interrupted" if context.stop.count else "it stopped answering")
    return errors | {rank: errors.get(rank, unfinished) for rank in left}


def _stored_bytes(files: dict[int, KeptFiles]) -> int:
    return sum(sum(kept.offsets.values()) for kept in files.values())
