"""find_early_end: workers that ended before a collective that others wait in, whose connections break then. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from multinode.diagnose.desync import MISSING, RankPlace, find_desync, with_open_call
from multinode.diagnose.evidence import NodeEvidence
from multinode.diagnose.place import raised_at
from multinode.records.flight import decode_flight
from multinode.records.log import last_lines
from multinode.records.run import Failure

_LINES = 20


def find_early_end(failure: Failure, nodes: Sequence[NodeEvidence]) -> Failure | None:
    """The failure of a worker that ended early, by the last collectives of all that told them; None without one.

    Args:
        failure: of a worker that lost its connection: it becomes a consequence.
        nodes: all of the run.
    """
    raised = {sample.rank: sample for node in nodes for sample in node.exceptions}
    homes = {sample.rank: (node, sample) for node in nodes for sample in node.flights}
    told = {rank: flight for rank, (_, sample) in homes.items() if (flight := decode_flight(sample.flight)) is not None}
    flights = {rank: with_open_call(flight) if rank in raised else flight for rank, flight in told.items()}
    lines = {rank: raised_at(sample.traceback) for rank, sample in raised.items()}
    places = {rank: RankPlace(collective=line.words) for rank, line in lines.items() if line is not None}
    ended = {rank: RankPlace(has_ended=True) for rank in flights if rank not in raised}
    found = find_desync(flights, {**places, **ended})
    # Ranks that raised end in another collective, too.
    if found is None or found.code != MISSING.code or not ended.keys() >= set(found.ranks):
        return None
    node, _ = homes[found.ranks[0]]
    return replace(
        failure,
        node=node.run.name,
        node_rank=node.run.node_rank,
        rank=found.ranks[0],
        exit_code=node.run.status.exit_code,
        signal=None,
        message=found.message,
        hint=found.hint,
        log_tail=last_lines(node.log, _LINES),
        kind="desync",
        error_id=None,
        cause=None,
        consequences=(f"{failure.node}: {failure.message}", *failure.consequences),
    )
