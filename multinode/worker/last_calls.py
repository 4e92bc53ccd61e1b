"""LastCalls: writes each collective of this worker, before it is called, into memory that outlives the worker.

The form is that of node/last_calls.py. No call costs a system call.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import sys
import time
import weakref
from types import CodeType, FrameType
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..node import last_calls as memory
from ..node.flight import LIBRARIES

# Frames between the function that looks and who calls the collective.
_OWN_FRAMES = 4
# Frames of the stack that are searched for the user's own line.
_MOST_FRAMES = 16
# Functions that are remembered; a training with ever new ones must not fill the memory.
_MOST_REMEMBERED = 4096
_POINT_TO_POINT = frozenset({"send", "recv"})


class _Place(NamedTuple):
    """Where one call is written, and what to call once it has returned."""

    at: int
    issued: Callable[[], None]
    ended: Callable[[], None]


class _Group:
    """The places of a process group's calls, and how the calls are numbered.

    Args:
        places: each is used in turn.
        size: number of workers in the group.
        is_numbered: whether torch numbers its collectives.
    """

    def __init__(self, places: Sequence[_Place], size: int, *, is_numbered: bool) -> None:
        self.places = itertools.cycle(places)
        self.size = size
        self._numbers = itertools.count(1)
        self._is_numbered = is_numbered
        self._skipped = 0

    def next_number(self, group: Any) -> int:
        """Number of the call that comes now: that of torch's flight recorder, where torch has one."""
        own = next(self._numbers)
        return _sequence(group) + 1 - self._skipped if self._is_numbered else own

    def skip(self, group: Callable[[], Any], before: int) -> None:
        """Leave out a send or receive, which gloo counts and the flight recorder does not."""
        self._skipped += _sequence(group()) - before


class LastCalls:
    """The block of this worker.

    Args:
        path: the run's `last-calls`.
        rank: global rank.

    Raises:
        OSError: there is no such memory, or none is left.
    """

    def __init__(self, path: str, rank: int) -> None:
        at = rank * memory.BLOCK_BYTES
        # Pages may be larger than a block.
        begin = at - at % mmap.ALLOCATIONGRANULARITY
        self._begin = at - begin
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # If memory were found missing only by a write to it, the write would end the training by SIGBUS.
            os.posix_fallocate(descriptor, at, memory.BLOCK_BYTES)
            self._map = mmap.mmap(descriptor, self._begin + memory.BLOCK_BYTES, offset=begin)
        finally:
            os.close(descriptor)
        # An earlier process of this rank may have written here.
        self._map[self._begin :] = bytes(memory.BLOCK_BYTES)
        memory.HEAD.pack_into(self._map, self._begin, memory.MAGIC, rank)
        self._groups: weakref.WeakKeyDictionary[Any, Optional[_Group]] = weakref.WeakKeyDictionary()
        self._indices: Dict[str, int] = {}
        # The last group: looking it up takes longer.
        self._last: Tuple[Callable[[], Any], Optional[_Group]] = (lambda: None, None)
        self._dtypes: Dict[Any, bytes] = {}
        self._files: Dict[CodeType, bytes] = {}

    def enter(
        self, op: str, group: Any, tensors: Any, *, is_share: bool, is_waited: bool
    ) -> Optional[Callable[[], None]]:
        """Write a call that is about to be made; returns a function to call once it has returned.

        Args:
            op: as in CallCount.
            group: its process group; None is the default one.
            tensors: the tensor or tensors that its size is that of; None for a barrier.
            is_share: whether they are one worker's share of the size.
            is_waited: whether it has ended when it returns.
        """
        if group is None:
            group = sys.modules["torch.distributed.distributed_c10d"].GroupMember.WORLD
        last, known = self._last
        if last() is not group:
            known = self._find(group)
        if known is None:
            return None
        if op in _POINT_TO_POINT:
            return functools.partial(known.skip, weakref.ref(group), _sequence(group))
        place = next(known.places)
        elements, dtype = self._contents(tensors)
        file, line = self._caller()
        memory.CALL.pack_into(
            self._map,
            place.at,
            known.next_number(group),
            elements * known.size if is_share else elements,
            time.time_ns(),
            line,
            op.encode(),
            dtype,
            file,
            memory.ENTERED,
        )
        return place.ended if is_waited else place.issued

    def _find(self, group: Any) -> Optional[_Group]:
        c10d = sys.modules["torch.distributed.distributed_c10d"]
        # A group without this worker is represented by a number.
        if not isinstance(group, c10d.ProcessGroup):
            return None
        if group not in self._groups:
            self._groups[group] = self._meet(group, c10d)
        self._last = (weakref.ref(group), self._groups[group])
        return self._groups[group]

    def _meet(self, group: Any, c10d: Any) -> Optional[_Group]:
        name = str(group.group_name)
        # A group that was destroyed leaves its name to another.
        index = self._indices.setdefault(name, len(self._indices))
        if index >= memory.GROUPS:
            return None
        ranks = list(c10d.get_process_group_ranks(group))
        step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        is_regular = step > 0 and ranks == list(range(ranks[0], ranks[-1] + 1, step))
        at = self._begin + memory.group_at(index)
        calls_at = at + memory.GROUP_BYTES
        self._map[calls_at : calls_at + memory.CALLS * memory.CALL_BYTES] = bytes(memory.CALLS * memory.CALL_BYTES)
        description = str(getattr(group, "group_desc", ""))
        members = (ranks[0], step, len(ranks)) if is_regular else (0, 0, 0)
        memory.GROUP.pack_into(self._map, at, name.encode(), description.encode(), *members)
        places = [self._place(calls_at + turn * memory.CALL_BYTES) for turn in range(memory.CALLS)]
        return _Group(places, len(ranks), is_numbered=_is_numbered(group, c10d))

    def _place(self, at: int) -> _Place:
        write = functools.partial(self._map.__setitem__, at + memory.CALL.size - 1)
        return _Place(at, functools.partial(write, memory.ISSUED), functools.partial(write, memory.ENDED))

    def _contents(self, tensors: Any) -> Tuple[int, bytes]:
        """Number of elements, and dtype in the flight recorder's words."""
        if isinstance(tensors, (list, tuple)):
            contents = [self._contents(each) for each in tensors]
            return sum(elements for elements, _ in contents), contents[0][1] if contents else b""
        if tensors is None:
            return 0, b""
        dtype = tensors.dtype
        name = self._dtypes.get(dtype)
        if name is None:
            # `torch.cuda.FloatTensor`
            name = self._dtypes[dtype] = tensors.type().rpartition(".")[2][: -len("Tensor")].encode()
        return tensors.numel(), name

    def _caller(self) -> Tuple[bytes, int]:
        """File and line of the innermost call that is the user's own; empty and 0 without one."""
        frame: Optional[FrameType] = sys._getframe(_OWN_FRAMES)  # noqa: SLF001 - inspect reads files, which takes long
        for _ in range(_MOST_FRAMES):
            if frame is None:
                break
            file = self._files.get(frame.f_code)
            if file is None:
                file = self._remember(frame.f_code)
            if file:
                return file, frame.f_lineno
            frame = frame.f_back
        return b"", 0

    def _remember(self, code: CodeType) -> bytes:
        if len(self._files) >= _MOST_REMEMBERED:
            self._files.clear()
        path = code.co_filename
        is_own = not any(part in path for part in LIBRARIES)
        file = self._files[code] = os.path.basename(path).encode(errors="replace") if is_own else b""
        return file


def open_last_calls(environ: Mapping[str, str], rank: int) -> Optional[LastCalls]:
    """The block of this worker; None without a run, or without memory for it."""
    if "MULTINODE_RUN_DIR" not in environ:
        return None
    try:
        return LastCalls(os.path.join(environ["MULTINODE_RUN_DIR"], memory.NAME), rank)
    except (OSError, ValueError):
        return None


def _is_numbered(group: Any, c10d: Any) -> bool:
    """Whether torch numbers all collectives of a group in one sequence: each of several backends has its own."""
    backends = {part.rpartition(":")[2] for part in str(c10d.get_backend_config(group)).split(",")}
    try:
        return len(backends) == 1 and _sequence(group) >= 0
    except RuntimeError:
        return False


def _sequence(group: Any) -> int:
    return int(group._get_sequence_number_for_group())  # noqa: SLF001 - torch has no other name
