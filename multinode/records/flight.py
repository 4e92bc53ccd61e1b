"""FlightDump: what torch's flight recorder holds of one rank, in the form of its JSON and of its pickles.

Worker and user's disk are not trusted: a dump is of limited size, and a pickle may hold plain values alone.
"""

from __future__ import annotations

import msgspec

from multinode.decoding import LineDecoder, convert, printable_values
from multinode.node.plain_pickle import read_plain

MOST_BYTES = 1 << 26

_Sizes = tuple[tuple[int, ...], ...]


class FlightFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One call of the Python stack that a pickle has of a collective."""

    name: str = ""
    filename: str = ""
    line: int = 0


class FlightEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One collective of a rank."""

    profiling_name: str  # `gloo:all_reduce`
    process_group: tuple[str, str] = ("0", "default_pg")  # name and description
    collective_seq_id: int = 0  # number within its group, from 1; `seq_id` of torch 2.3
    seq_id: int = 0
    is_p2p: bool = False
    input_sizes: _Sizes = ()  # the shape of each tensor
    output_sizes: _Sizes = ()
    input_dtypes: tuple[str, ...] | str = ()
    state: str = ""  # `scheduled`, `started` or `completed`; gloo has only the first
    retired: bool = False
    time_created_ns: int | None = None
    frames: tuple[FlightFrame, ...] = ()  # innermost first; empty in JSON

    @property
    def number(self) -> int:
        """Number of the collective within its group, which its members share."""
        return self.collective_seq_id or self.seq_id

    @property
    def op(self) -> str:
        """`all_gather`: the collective in torch.distributed's words."""
        name = self.profiling_name.rpartition(":")[2]
        words = {"_all_gather_base": "all_gather_into_tensor", "_reduce_scatter_base": "reduce_scatter_tensor"}
        return words.get(name, name)

    @property
    def has_ended(self) -> bool:
        """Whether the rank is done with it."""
        return self.retired or self.state == "completed"


class FlightGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A process group of a rank."""

    name: str = ""
    desc: str = ""
    ranks: tuple[int, ...] | str = ()  # torch writes `[0, 1]` as text

    @property
    def members(self) -> tuple[int, ...]:
        """Global ranks; empty if unknown."""
        if not isinstance(self.ranks, str):
            return self.ranks
        parts = [part.strip() for part in self.ranks.strip("[] ").split(",")]
        return tuple(int(part) for part in parts if part.isdecimal())


class FlightDump(msgspec.Struct, frozen=True, kw_only=True):
    """What the flight recorder holds of one rank."""

    entries: tuple[FlightEntry, ...]
    pg_config: dict[str, FlightGroup] = {}
    rank: int | None = None  # of ours; torch names the file by it
    time_ns: int | None = None  # when it was written, on the node's wall clock; of ours


_decoder = LineDecoder(FlightDump)


def decode_flight(text: str | bytes) -> FlightDump | None:
    """The dump in this JSON; None if it is none."""
    data = text.encode() if isinstance(text, str) else text
    try:
        return _decoder.decode(data) if len(data) <= MOST_BYTES else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def read_flight(data: bytes) -> FlightDump | None:
    """The dump in a file: a pickle, or JSON; None if it is neither, or too large."""
    if len(data) > MOST_BYTES:
        return None
    if not data.startswith(b"\x80"):
        return decode_flight(data)
    try:
        return convert(printable_values(read_plain(data)), FlightDump, strict=False)
    except Exception:  # noqa: BLE001 - pickle raises anything for data that is no pickle
        return None
