"""find_ended_desync: ranks that did not meet the others of their group, and the workers have ended since. Pure.

Whose connection breaks then, and whom gloo aborts, is not who is to blame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from multinode.diagnose.desync import MISSING, Desync, RankPlace, find_desync, find_mismatch, find_stuck, with_open_call
from multinode.diagnose.evidence import NodeEvidence
from multinode.diagnose.place import raised_at
from multinode.records.flight import FlightDump, decode_flight
from multinode.records.log import last_lines
from multinode.records.run import Failure
from multinode.records.samples import ExceptionSample

_LINES = 20
_KINDS = {"connection", "timeout", "desync"}


def find_ended_desync(failure: Failure, nodes: Sequence[NodeEvidence]) -> Failure | None:
    """The failure of the ranks that did not meet the others, by the last collectives of all; None without one.

    Args:
        failure: a failure that may follow from it, and then becomes a consequence.
        nodes: all of the run.
    """
    # gloo aborts a rank that gets another size than it called, and NCCL's watchdog one that waits too long.
    if failure.kind not in _KINDS and failure.signal != "SIGABRT":
        return None
    raised = {sample.rank: sample for node in nodes for sample in node.exceptions}
    homes = {sample.rank: node for node in nodes for sample in node.flights}
    recorded, dumped, called = (_dumps(nodes, source) for source in ("recorder", "watchdog", "calls"))
    found = (
        _find_early_end(recorded, raised)
        or find_desync(dumped, {})
        or find_stuck(dumped)
        # By its calls, a rank that others wait for may have been ended because of them.
        or find_mismatch(called, {})
    )
    if found is None:
        return None
    node = next(homes[rank] for rank in (*found.ranks, *found.others) if rank in homes)
    return replace(
        failure,
        node=node.run.name,
        node_rank=node.run.node_rank,
        rank=found.blamed,
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


def _dumps(nodes: Sequence[NodeEvidence], source: str) -> dict[int, FlightDump]:
    samples = [sample for node in nodes for sample in node.flights if sample.source == source]
    dumps = {sample.rank: decode_flight(sample.flight) for sample in samples}
    return {rank: dump for rank, dump in dumps.items() if dump is not None}


def _find_early_end(recorded: Mapping[int, FlightDump], raised: Mapping[int, ExceptionSample]) -> Desync | None:
    """Ranks that ended before a collective in which others waited until their connection broke."""
    flights = {rank: with_open_call(dump) if rank in raised else dump for rank, dump in recorded.items()}
    lines = {rank: raised_at(sample.traceback) for rank, sample in raised.items()}
    places = {rank: RankPlace(collective=line.words) for rank, line in lines.items() if line is not None}
    ended = {rank: RankPlace(has_ended=True) for rank in flights if rank not in raised}
    found = find_desync(flights, {**places, **ended})
    # Ranks that raised end in another collective, too.
    return found if found is not None and found.code == MISSING.code and ended.keys() >= set(found.ranks) else None
