"""The collectives that can be measured: their buffers, one call of them, and whether its values are exact.

Needs torch, given by the caller. Counts elements and bytes as nccl-tests does, so that figures can be compared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

# nccl-tests' names of element types, and torch's.
_DTYPES = {"half": "float16", "bfloat16": "bfloat16", "float": "float32", "double": "float64"}
_REDOPS = {"prod": "PRODUCT"}
_EXACT = {"int8": 127, "uint8": 255, "half": 2048, "bfloat16": 256}
_MOST_EXACT = 1 << 20
_PERIOD = 97
# Shares of a buffer begin at such multiples, as nccl-tests lays them out.
_ALIGN_BYTES = 16
# Values are made and compared piece by piece: beside the buffers themselves there is room for little.
_PIECE = 1 << 22


class Operation(ABC):
    """One collective on buffers of one size.

    Args:
        torch: the module.
        name: the collective.
        size_bytes: S as asked for.
        request: `dtype` and `redop`.
        device: where the buffers are.

    Attributes:
        count: elements, as nccl-tests counts them.
        size_bytes: S as it is: rounded down to what divides among the workers.
        reduces: whether `redop` matters.
    """

    reduces = False
    # Whether S is what all workers have together, and which of the two buffers hold as much; or whether both are one.
    shared = False
    sends_all = False
    receives_all = False
    in_place = False

    def __init__(self, torch: Any, request: dict[str, Any], device: Any) -> None:
        self.torch = torch
        self.dist = torch.distributed
        self.rank = self.dist.get_rank()
        self.ranks = self.dist.get_world_size()
        self.dtype_name: str = request["dtype"]
        self.redop = request["redop"]
        self.dtype = getattr(torch, _DTYPES.get(self.dtype_name, self.dtype_name))
        self.device = device
        width = torch.empty(0, dtype=self.dtype).element_size()
        elements = max(1, request["size_bytes"] // width)
        if self.shared:
            elements = _share(elements // self.ranks, max(1, _ALIGN_BYTES // width))
        self.count = elements
        self.size_bytes = elements * width * (self.ranks if self.shared else 1)
        self.sent = self._zeros(everything=self.sends_all)
        self.received = self.sent if self.in_place else self._zeros(everything=self.receives_all)

    @abstractmethod
    def run(self) -> None:
        """Call the collective once."""

    @abstractmethod
    def expect(self, index: Any) -> Any:
        """What `received` holds at these places after `run`."""

    def clear(self) -> None:
        """Make all buffers zero again."""
        self.sent.zero_()
        self.received.zero_()

    def count_wrong(self) -> int:
        """Run once on values that differ by place and by rank, and count the elements that came out wrong."""
        self.received.zero_()
        self._pieces(self.sent, lambda piece, index: piece.copy_(self.value(index, self.rank)))
        self.run()
        wrong = 0

        def compare(piece: Any, index: Any) -> None:
            nonlocal wrong
            expected = self.expect(index)
            # An average is the one reduction that divides: its last bit may differ.
            same = (
                self.torch.isclose(piece.double(), expected.double(), rtol=self._rounding())
                if self.reduces and self.redop == "avg"
                else piece == expected.to(self.dtype)
            )
            wrong += int((~same).sum().item())

        self._pieces(self.received, compare)
        return wrong

    def value(self, index: Any, rank: int) -> Any:
        """What `rank` sends at these places; small enough for any reduction over all ranks to be exact."""
        if self.reduces and self.redop == "prod":
            return 1 + (index + rank) % 2 if rank < self._doublings() else self.torch.ones_like(index)
        return index % self._period() + rank % self._period()

    def reduced(self, index: Any) -> Any:
        """The reduction of what all ranks send at these places."""
        if self.redop == "prod":
            twos = sum((index + rank) % 2 for rank in range(min(self.ranks, self._doublings())))
            return 2**twos
        ranks = [rank % self._period() for rank in range(self.ranks)]
        place = index % self._period()
        if self.redop == "max":
            return place + max(ranks)
        if self.redop == "min":
            return place + min(ranks)
        total = place * self.ranks + sum(ranks)
        return total / self.ranks if self.redop == "avg" else total

    def reduction(self) -> Any:
        """The reduction, as torch has it."""
        return getattr(self.dist.ReduceOp, _REDOPS.get(self.redop, self.redop.upper()))

    def _zeros(self, *, everything: bool) -> Any:
        """A buffer of zeros, which stay zeros whatever is reduced, however often."""
        count = self.count * (self.ranks if everything else 1)
        return self.torch.zeros(count, dtype=self.dtype, device=self.device)

    def _rounding(self) -> float:
        """What an average may be off: its sum is rounded once for each rank."""
        rounding: float = self.torch.finfo(self.dtype).eps * (self.ranks + 1)
        return rounding

    def _doublings(self) -> int:
        """How often a product may double."""
        return self._largest.bit_length() - 1

    def _period(self) -> int:
        # Below two, all values were equal and nothing could be told apart.
        share: int = self._largest // (2 * self.ranks)
        return max(2, min(_PERIOD, share))

    @property
    def _largest(self) -> int:
        """Up to here every integer is exact in the type."""
        return _EXACT.get(self.dtype_name, _MOST_EXACT)

    def _pieces(self, buffer: Any, visit: Callable[[Any, Any], object]) -> None:
        for first in range(0, buffer.numel(), _PIECE):
            piece = buffer[first : first + _PIECE]
            visit(piece, self.torch.arange(first, first + piece.numel(), dtype=self.torch.int64, device=self.device))


class _AllReduce(Operation):
    reduces = True
    in_place = True

    def run(self) -> None:
        self.dist.all_reduce(self.received, op=self.reduction())

    def expect(self, index: Any) -> Any:
        return self.reduced(index)


class _AllGather(Operation):
    shared = True
    receives_all = True

    def run(self) -> None:
        self.dist.all_gather_into_tensor(self.received, self.sent)

    def expect(self, index: Any) -> Any:
        sender = index // self.count
        return (index % self.count) % self._period() + sender % self._period()


class _ReduceScatter(Operation):
    reduces = True
    shared = True
    sends_all = True

    def run(self) -> None:
        self.dist.reduce_scatter_tensor(self.received, self.sent, op=self.reduction())

    def expect(self, index: Any) -> Any:
        return self.reduced(index + self.rank * self.count)


class _Broadcast(Operation):
    in_place = True

    def run(self) -> None:
        self.dist.broadcast(self.received, src=0)

    def expect(self, index: Any) -> Any:
        return self.value(index, 0)


class _AllToAll(Operation):
    shared = True
    sends_all = True
    receives_all = True

    def run(self) -> None:
        self.dist.all_to_all_single(self.received, self.sent)

    def expect(self, index: Any) -> Any:
        sender = index // self.count
        place = index % self.count + self.rank * self.count
        return place % self._period() + sender % self._period()


class _SendRecv(Operation):
    """nccl-tests' ring: each rank sends to the next one and receives from the one before, both at once."""

    def run(self) -> None:
        after, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        both = [
            self.dist.P2POp(self.dist.isend, self.sent, after),
            self.dist.P2POp(self.dist.irecv, self.received, before),
        ]
        for request in self.dist.batch_isend_irecv(both):
            request.wait()

    def expect(self, index: Any) -> Any:
        return self.value(index, (self.rank - 1) % self.ranks)


_OPERATIONS: dict[str, type[Operation]] = {
    "all_reduce": _AllReduce,
    "all_gather": _AllGather,
    "reduce_scatter": _ReduceScatter,
    "broadcast": _Broadcast,
    "all_to_all": _AllToAll,
    "sendrecv": _SendRecv,
}


def make_operation(torch: Any, request: dict[str, Any], device: Any) -> Operation:
    """The operation that a request asks for.

    Args:
        torch: the module; its process group stands.
        request: `collective`, `size_bytes`, `dtype`, `redop`.
        device: where the buffers are.
    """
    return _OPERATIONS[request["collective"]](torch, request, device)


def _share(elements: int, align: int) -> int:
    return max(1, elements // align * align or elements)
