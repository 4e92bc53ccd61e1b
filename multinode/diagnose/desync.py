"""find_desync: in which collective the ranks of a process group do not meet, by their flight recorders. Pure.

The ranks of a group must call the same collectives in the same order. torch numbers them in each group, so that equal
numbers belong together. A collective that has ended proves nothing: only those that a rank waits in are compared.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import msgspec

from multinode.cluster.hostfile import fold_numbers
from multinode.diagnose.place import LIBRARY
from multinode.findings.finding import Finding
from multinode.findings.rule import Rule, RuleGroup
from multinode.records.flight import FlightDump, FlightEntry, FlightGroup

DESYNCS = RuleGroup("Ranks that are out of sync in a collective")
_SAME_ORDER = "every rank of a group must call the same collectives in the same order"
MISSING = DESYNCS.rule(
    "missing_rank",
    about="a rank that has not entered a collective in which others wait",
    message="{who} {has} not entered {collective}{line}{position}; {others} {wait} in this collective{waited}",
    hint="look for the reason in the log and the stack of each missing rank",
)
_OTHER_OPERATION = DESYNCS.rule(
    "other_operation",
    about="a rank that called a different collective than the others",
    message="{who} called {called}{position}, but {others} {wait} in {collective}{line}{waited}{tie}",
    hint=_SAME_ORDER,
)
_OTHER_SIZE = DESYNCS.rule(
    "other_size",
    about="a rank that called the same collective as the others, but with a different size or dtype",
    message="{who} called {called}{position}, but {others} {wait} in {collective}{line}{waited}{tie}",
    hint="every rank must pass tensors of the same size and dtype to this collective",
)
_OTHER_ORDER = DESYNCS.rule(
    "other_order",
    about="ranks that wait for each other in different collectives",
    message="{who} {waits} in {called}{position} while {others} {wait} in {collective}{line}{waited}",
    hint=_SAME_ORDER,
)
_NO_DUMP = DESYNCS.rule(
    "no_dump",
    about="a rank without a flight recorder dump, if the other ranks of its group wait in a collective",
    message="{who} left no dump; {others} {wait} in {collective}{line}{waited}",
    hint="add the dump of that rank, or check its log: the rank may have ended earlier",
)
_NOBODY_MISSING = DESYNCS.rule(
    "nobody_missing",
    about="a collective that all ranks have entered but that does not finish",
    message="all {count} ranks have entered {collective}{line}, but it has not finished{waited}",
    hint="test the network between the nodes: multinode check",
)
_TIE = "; the same number of ranks made each call, so either call may be wrong"
_DEFAULT = {"default_pg", "undefined", ""}
# Their sizes may differ between ranks.
_UNEVEN = {"all_to_all", "alltoall", "alltoall_base", "all_to_allv", "gather", "scatter", "barrier", "coalesced"}
# What each rank passes may differ; what each gets does not.
_BY_OUTPUT = {"all_gather", "all_gather_into_tensor", "allgather"}


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank is, by its stack; texts are empty where unknown."""

    collective: str = ""  # `train.py:88`, if it waits in a collective there
    elsewhere: str = ""  # `load_batch (train.py:70)`, if it does not
    has_ended: bool = False


class Desync(Finding, frozen=True, kw_only=True):
    """Ranks that do not meet the others of their group."""

    ranks: tuple[int, ...]  # the parameters that differ
    others: tuple[int, ...]
    is_tie: bool = False  # whether the others may be those to blame, as they are no more

    @property
    def blamed(self) -> int | None:
        """The first rank to blame; None if there is none, or it is unknown."""
        return self.ranks[0] if self.ranks and not self.is_tie else None


class _RankGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One group: what each of its members that has a dump called, by number."""

    name: str
    desc: str
    members: tuple[int, ...]
    calls: Mapping[int, Mapping[int, FlightEntry]]

    @property
    def shown(self) -> str:
        if self.desc not in _DEFAULT:
            return f" of group {self.desc}"
        return "" if self.desc == "default_pg" else f" of group {self.name} (ranks {fold_numbers(self.members)})"

    def last(self, rank: int) -> int:
        """Number of the rank's last call; 0 without one."""
        return max(self.calls[rank], default=0)

    def waited(self, rank: int) -> int | None:
        """Number of the first call that the rank waits in."""
        return min((number for number, call in self.calls[rank].items() if not call.has_ended), default=None)


class _Wait(msgspec.Struct, frozen=True, kw_only=True):
    """A collective in which some ranks of a group wait, and the ranks that do not meet them there."""

    group: _RankGroup
    number: int
    waiting: tuple[int, ...]
    missing: tuple[int, ...]

    @property
    def call(self) -> FlightEntry:
        return self.group.calls[self.waiting[0]][self.number]

    @property
    def since_ns(self) -> int:
        times = [self.group.calls[rank][self.number].time_created_ns for rank in self.waiting]
        return min((time for time in times if time), default=0)


def with_open_call(dump: FlightDump) -> FlightDump:
    """The dump of a rank whose last collective failed, which torch takes for one that has ended."""
    if not dump.entries:
        return dump
    return msgspec.structs.replace(
        dump, entries=(*dump.entries[:-1], msgspec.structs.replace(dump.entries[-1], retired=False, state="started"))
    )


def find_desync(dumps: Mapping[int, FlightDump], places: Mapping[int, RankPlace]) -> Desync | None:
    """Who does not meet the others, and where.

    Args:
        dumps: by global rank. A rank without one is not judged.
        places: where ranks are, by global rank.
    """
    if (found := find_mismatch(dumps, places)) is not None:
        return found
    groups = list(_groups(dumps))
    words = _Words(dumps, places)
    waits = list(filter(None, map(_wait, groups)))
    stuck = set(chain.from_iterable(wait.waiting for wait in waits))
    # A wait for a rank that waits elsewhere follows from that one; clocks of nodes do not say so.
    waits.sort(key=lambda wait: (not stuck.isdisjoint(wait.missing), wait.since_ns))
    for wait in waits:
        # One that waits elsewhere is late because of others.
        if free := tuple(rank for rank in wait.missing if rank not in stuck):
            return words.missing(msgspec.structs.replace(wait, missing=free))
    return words.circle(waits) if waits else None


def find_mismatch(dumps: Mapping[int, FlightDump], places: Mapping[int, RankPlace]) -> Desync | None:
    """Who has called something else than the others; parameters as those of `find_desync`."""
    words = _Words(dumps, places)
    return next(filter(None, (_mismatch(group, words) for group in _groups(dumps))), None)


def find_stuck(dumps: Mapping[int, FlightDump]) -> Desync | None:
    """In which collective all ranks that have a dump wait, where `find_desync` finds nothing.

    Args:
        dumps: by global rank.
    """
    words = _Words(dumps, {})
    for group in _groups(dumps):
        numbers = [number for rank in group.calls if (number := group.waited(rank)) is not None]
        if numbers:
            number = min(numbers)
            waiting = tuple(rank for rank, calls in group.calls.items() if number in calls)
            missing = tuple(rank for rank in group.members if rank not in group.calls)
            return words.stuck(_Wait(group=group, number=number, waiting=waiting, missing=missing))
    return None


def _groups(dumps: Mapping[int, FlightDump]) -> Iterator[_RankGroup]:
    calls: dict[tuple[str, tuple[int, ...]], dict[int, dict[int, FlightEntry]]] = {}
    descriptions: dict[tuple[str, tuple[int, ...]], str] = {}
    every: dict[str, list[FlightGroup]] = collections.defaultdict(list)
    for dump in dumps.values():
        for name, config in dump.pg_config.items():
            every[config.name or name].append(config)
    for rank, dump in dumps.items():
        # Groups of other ranks may have the same name.
        known = {config.name or name: config for name, config in dump.pg_config.items() if config.members}
        for name, config in known.items():
            calls.setdefault((name, config.members), {}).setdefault(rank, {})
            descriptions[name, config.members] = config.desc
        for entry in dump.entries:
            name, description = entry.process_group
            # A rank that has destroyed its groups does not know their members.
            own = known.get(name) or next((group for group in every[name] if rank in group.members), None)
            key = (name, own.members if own is not None else ())
            descriptions.setdefault(key, description)
            numbered = calls.setdefault(key, {}).setdefault(rank, {})
            if not entry.is_p2p:
                numbered[entry.number] = entry
    for (name, members), by_rank in calls.items():
        ranks = members or (tuple(sorted(dumps)) if name in {"0", ""} else tuple(sorted(by_rank)))
        complete = {rank: by_rank.get(rank, {}) for rank in ranks if rank in dumps}
        if complete:
            yield _RankGroup(name=name, desc=descriptions[name, members], members=ranks, calls=complete)


def _wait(group: _RankGroup) -> _Wait | None:
    waited = {rank: number for rank in group.calls if (number := group.waited(rank)) is not None}
    if not waited:
        return None
    for number in sorted(set(waited.values())):
        missing = tuple(rank for rank in group.calls if group.last(rank) < number)
        if missing:
            waiting = tuple(rank for rank, calls in group.calls.items() if number in calls and rank not in missing)
            return _Wait(group=group, number=number, waiting=waiting, missing=missing)
    return None


def _mismatch(group: _RankGroup, words: _Words) -> Desync | None:
    """The first collective that a rank waits in, and that not all have called alike."""
    numbers = sorted({number for calls in group.calls.values() for number, call in calls.items() if not call.has_ended})
    for number in numbers:
        called = {rank: calls[number] for rank, calls in group.calls.items() if number in calls}
        for rule, kind in ((_OTHER_OPERATION, _operation), (_OTHER_SIZE, _size)):
            kinds: dict[object, list[int]] = {}
            for rank, call in called.items():
                kinds.setdefault(kind(call), []).append(rank)
            if len(kinds) > 1:
                *_, odd, most = sorted(kinds.values(), key=lambda ranks: (len(ranks), -ranks[0]))
                odd = [rank for rank in called if rank not in most] if len(kinds) == 2 else odd  # noqa: PLR2004 - two sides
                # Operations that all have called, in turn.
                ordered = rule is _OTHER_OPERATION and _in_turn(group, number, odd[0], most[0])
                wait = _Wait(group=group, number=number, waiting=tuple(most), missing=tuple(odd))
                return words.mismatch(_OTHER_ORDER if ordered else rule, wait)
    return None


def _in_turn(group: _RankGroup, number: int, rank: int, other: int) -> bool:
    """Whether two ranks called the same operations from this number on, in another order."""
    ours, theirs = (
        [(_operation(call), _size(call)) for at, call in sorted(group.calls[each].items()) if at >= number]
        for each in (rank, other)
    )
    count = min(len(ours), len(theirs))
    return count > 1 and sorted(map(str, ours[:count])) == sorted(map(str, theirs[:count]))


def _operation(call: FlightEntry) -> object:
    return call.op


def _size(call: FlightEntry) -> object:
    if call.op in _UNEVEN or "all_to_all" in call.op or "alltoall" in call.op:
        return None
    sizes = call.output_sizes if call.op in _BY_OUTPUT else call.input_sizes
    return sum(map(math.prod, sizes)), call.input_dtypes


class _Words:
    """The words of a finding."""

    def __init__(self, dumps: Mapping[int, FlightDump], places: Mapping[int, RankPlace]) -> None:
        self._dumps = dumps
        self._places = places

    def missing(self, wait: _Wait) -> Desync:
        """Ranks have not come yet."""
        ranks = wait.missing
        place = self._place(ranks[0])
        position = f", and {_verb(ranks, 'is', 'are')} in {place.elsewhere}" if place.elsewhere else ""
        if place.has_ended:
            position = f", and {_verb(ranks, 'has', 'have')} ended"
        return self._found(MISSING, wait, has=_verb(ranks, "has", "have"), position=position)

    def mismatch(self, rule: Rule, wait: _Wait) -> Desync:
        """Ranks have called something else."""
        call = wait.group.calls[wait.missing[0]][wait.number]
        sized = rule is _OTHER_SIZE
        position = self._line(wait.missing[0], call)
        found = self._found(
            rule,
            wait,
            sized=sized,
            called=_call(call, sized=sized),
            position=position,
            tie=_TIE if len(wait.missing) == len(wait.waiting) else "",
        )
        return msgspec.structs.replace(found, is_tie=len(wait.missing) == len(wait.waiting))

    def circle(self, waits: Sequence[_Wait]) -> Desync:
        """Each of these waits is for ranks that wait in another."""
        odd = min(waits, key=lambda wait: (len(wait.waiting), -wait.since_ns))
        most = next((wait for wait in waits if wait is not odd), odd)
        called = f"{_call(odd.call)} #{odd.number}{odd.group.shown}"
        position = self._line(odd.waiting[0], odd.call)
        met = msgspec.structs.replace(most, missing=odd.waiting)
        return self._found(_OTHER_ORDER, met, called=called, position=position)

    def stuck(self, wait: _Wait) -> Desync:
        """Nobody who has a dump is missing."""
        return self._found(_NO_DUMP if wait.missing else _NOBODY_MISSING, wait, count=str(len(wait.waiting)))

    def _found(self, rule: Rule, wait: _Wait, *, sized: bool = False, **values: str) -> Desync:
        ranks, others = wait.missing, wait.waiting
        known = {
            "who": _names(ranks),
            "others": _names(others),
            "collective": f"{_call(wait.call, sized=sized)} #{wait.number}{wait.group.shown}",
            "line": self._line(others[0], wait.call),
            "waits": _verb(ranks, "waits", "wait"),
            "wait": _verb(others, "waits", "wait"),
            "waited": self._waited(wait),
        }
        return Desync(ranks=ranks, others=others, **rule.fields(None, {**known, **values}))

    def _waited(self, wait: _Wait) -> str:
        times = [
            (now - created) / 1e9
            for rank in wait.waiting
            if (now := self._dumps[rank].time_ns) is not None
            and (created := wait.group.calls[rank][wait.number].time_created_ns) is not None
        ]
        return f" for {max(times):.0f} s" if times else ""

    def _line(self, rank: int, call: FlightEntry) -> str:
        frame = next((frame for frame in call.frames if not LIBRARY.search(frame.filename)), None)
        line = f"{frame.filename.rpartition('/')[2]}:{frame.line}" if frame is not None else ""
        line = line or self._place(rank).collective
        return f" ({line})" if line else ""

    def _place(self, rank: int) -> RankPlace:
        return self._places.get(rank, RankPlace())


def _call(call: FlightEntry, *, sized: bool = False) -> str:
    """`all_reduce`, or `all_reduce of 8 elements (Float)`."""
    size = _size(call) if sized else None
    if not isinstance(size, tuple):
        return call.op
    dtypes = call.input_dtypes if isinstance(call.input_dtypes, str) else ", ".join(dict.fromkeys(call.input_dtypes))
    return f"{call.op} of {size[0]} elements{f' ({dtypes})' if dtypes else ''}"


def _names(ranks: Sequence[int]) -> str:
    return f"{_verb(ranks, 'rank', 'ranks')} {fold_numbers(sorted(ranks))}"


def _verb(ranks: Sequence[int], one: str, several: str) -> str:
    return one if len(ranks) == 1 else several
