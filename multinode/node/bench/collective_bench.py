"""Collective benchmark: a worker under torchrun that times collectives and checks their values.

Needs torch, so it runs in the job's environment, as `torchrun <agent.pyz> collectives`; MULTINODE_REQUEST says what.
Records every iteration, raw; the controller computes bandwidths. Every message is warmed up first: connecting is not
timed. Iterations follow each other without a barrier between them, whose skew would be timed as well. A message may be
measured in turns with raw TCP between the nodes, so that both see the same of what else goes on.
"""

from __future__ import annotations

import glob
import importlib
import json
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Optional, Union

from ..facts.nics import Counters, added, grown, read_nics
from ..files import append_lines
from .device_ops import find_device, time_events
from .rings import RawRing, RdmaRing, used_ports

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


# Printed once for a communicator or a connection under NCCL_DEBUG=INFO (NCCL's init.cc, net_socket.cc, net_ib.cc).
_TELLING = re.compile(
    r"NCCL version|Bootstrap ?:|NET/|NET plugin|Using network| via |Channel \d+/\d+ :|Trees \[|coll channels"
)
_MOST_LINES = 400
_MOST_BYTES = 4 << 20
# Torch's names of the devices that a backend needs.
_DEVICE_KINDS = {"nccl": "cuda", "xccl": "xpu", "hccl": "npu"}
# TCP over one connection may be bound by a processor, and over several not.
_CONNECTIONS = (1, 4)


def main() -> None:
    """Run the size scan that the request asks for, and write one record a message to this worker's samples."""
    import torch
    import torch.distributed as dist

    request = json.loads(os.environ["MULTINODE_REQUEST"])
    backend = request["backend"] or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "hccl":
        # It registers the device and the backend.
        importlib.import_module("torch_npu")
    need = f"the {backend} backend needs a GPU for each worker"
    device = find_device(torch, kind=_DEVICE_KINDS.get(backend), need=need)
    join_group(dist, backend, device)
    worker = _CollectiveWorker(torch, device, request)
    worker.record(
        {
            "kind": "benchmark",
            "world_size": dist.get_world_size(),
            "backend": backend,
            "timer": device.type if worker.module is not None else "clock",
            "device": worker.module.get_device_name(device) if worker.module is not None else None,
        }
    )
    if any(message["turns"] for message in request["messages"]):
        worker.join_ring()
    for index, message in enumerate(request["messages"]):
        worker.record({"kind": "collective", "index": index, **worker.measure(index, message)})
    if backend == "nccl":
        lines = read_nccl_log(os.environ["MULTINODE_RUN_DIR"], os.getpid())
        worker.record({"kind": "nccl", "lines": lines})
    # Not after an error: the others sit in a collective, this one would wait for them, and nobody would hear why.
    dist.destroy_process_group()


def join_group(dist: Any, backend: str, device: Any) -> None:
    """Join the process group; NCCL gets the worker's GPU, which it would else guess from the global rank.

    With `device_id` its communicator is made at once, so that no collective that is timed waits for it.
    """
    dist.init_process_group(backend, **({"device_id": device} if backend == "nccl" else {}))


class _CollectiveWorker:
    """This process among the workers.

    Args:
        torch: the module; its process group stands.
        device: where the buffers are.
        request: the size scan.
    """

    def __init__(self, torch: Any, device: Any, request: dict[str, Any]) -> None:
        # Torch's of the device; None of a processor.
        self.module = getattr(torch, device.type) if device.type != "cpu" else None
        self._torch = torch
        self._dist = torch.distributed
        self._device = device
        self._request = request
        self._rank = self._dist.get_rank()
        self._local_rank = int(os.environ["LOCAL_RANK"])
        self._ring: Optional[RawRing] = None

    def join_ring(self) -> None:
        """Let the first workers of the nodes know each other, and time round trips."""
        ring = RawRing(self._request["addr"]) if self._local_rank == 0 else None
        places = self._gather_places(ring)
        if ring is not None:
            ring.join(places)
            self._ring = ring
            for result in ring.ping():
                self.record({"kind": "ping", "times_us": result["times_us"], "error": result["error"]})
        self._dist.barrier()

    def measure(self, index: int, message: dict[str, Any]) -> dict[str, Any]:
        """Verify, warm up, time: the record of one message."""
        operation = make_operation(self._torch, {**self._request, **message}, self._device)
        checks = self._request["check"]
        wrong = sum(operation.count_wrong() for _ in range(checks)) if checks else None
        operation.clear()
        before = self._read_nics() if message["turns"] else None
        iters = self._agree_iters(self._time(operation, self._request["warmup_iters"]))
        if message["turns"]:
            self._write_rdma(index, before)
        turns = min(message["turns"], iters)
        parts = [iters] if not turns else [iters // turns + (turn < iters % turns) for turn in range(turns)]
        times_us: list[float] = []
        nics: Optional[Counters] = {} if self._local_rank == 0 else None
        for part in parts:
            if turns:
                self._stream(index)
            before = self._read_nics()
            # Who left the barrier first would wait in it for the others: it is run once more and not timed.
            operation.run()
            times_us += self._time(operation, part)
            after = self._read_nics()
            if nics is not None and before is not None and after is not None:
                nics = added(nics, grown(before, after))
        return {
            "collective": message["collective"],
            "dtype": operation.dtype_name,
            "redop": operation.redop if operation.reduces else "none",
            "size_bytes": operation.size_bytes,
            "count": operation.count,
            "time_s": time.time(),
            "times_us": times_us,
            "num_wrong": wrong,
            "nics": nics,
            "nic_iters": iters + len(parts),
        }

    def record(self, fields: dict[str, Any]) -> None:
        """Append a record to this worker's samples."""
        path = os.path.join(os.environ["MULTINODE_RUN_DIR"], "samples", f"rank-{self._rank}.jsonl")
        line = json.dumps({**fields, "rank": self._rank, "local_rank": self._local_rank}).encode() + b"\n"
        append_lines(path, line)

    def _stream(self, index: int) -> None:
        """Before a turn; no more after a stream that failed, whose deadline all workers wait out."""
        for count in _CONNECTIONS:
            results = self._ring.stream(count) if self._ring is not None else []
            if results:
                figures = [{name: result.get(name) for name in ("size_bytes", "time_s", "error")} for result in results]
                self.record({"kind": "stream", "index": index, "results": figures})
            if any(result["error"] is not None for result in results):
                self._ring = None

    def _write_rdma(self, index: int, before: Optional[Counters]) -> None:
        """Over the ports that the warm-up went over, where there are such on every node, and the program for it."""
        after = self._read_nics()
        ring: Optional[RdmaRing] = None
        if before is not None and after is not None and self._request["addr"] is not None:
            ring = RdmaRing(self._request["addr"], used_ports(before, after))
        places = self._gather_places(ring)
        if None in places or len(places) < 2:  # noqa: PLR2004 - somebody, and another
            return
        if ring is not None:
            ring.serve(places)
        self._dist.barrier()
        results = ring.write() if ring is not None else []
        if results:
            self.record({"kind": "stream", "index": index, "network": "rdma", "results": results})
        # Nobody ends a server that is written to.
        self._dist.barrier()
        if ring is not None:
            ring.close()

    def _gather_places(self, ring: Union[RawRing, RdmaRing, None]) -> list[Any]:
        """Of all nodes, in node-rank order; None of one that has none to offer."""
        # Of the other workers of a node an empty answer.
        places: list[Any] = [()] * self._dist.get_world_size()
        mine = None if ring is None else ring.place
        self._dist.all_gather_object(places, mine if self._local_rank == 0 else ())
        return [place for place in places if place != ()]

    def _time(self, operation: Operation, iters: int) -> list[float]:
        """Microseconds of each of so many calls, one after the other."""
        if self.module is not None:
            return [seconds * 1e6 for seconds in time_events(self.module, operation.run, 1, iters)]
        times_us = []
        for _ in range(iters):
            began = time.perf_counter_ns()
            operation.run()
            times_us.append((time.perf_counter_ns() - began) / 1000)
        return times_us

    def _agree_iters(self, warm_us: list[float]) -> int:
        """As many iterations as asked for, fewer where they would take too long; the same on all workers."""
        slowest = self._torch.tensor([min(warm_us, default=0.0)], dtype=self._torch.float32, device=self._device)
        self._dist.all_reduce(slowest, op=self._dist.ReduceOp.MAX)
        if slowest.item() <= 0:
            return int(self._request["iters"])
        affordable = int(self._request["max_seconds"] * 1e6 / slowest.item())
        return int(min(self._request["iters"], max(self._request["min_iters"], affordable)))

    def _read_nics(self) -> Optional[Counters]:
        """The node's counters while nothing moves; its first worker reads them for all."""
        if self.module is not None:
            self.module.synchronize()
        self._dist.barrier()
        nics = read_nics() if self._local_rank == 0 else None
        # Nobody sends before all have read.
        self._dist.barrier()
        return nics


def read_nccl_log(directory: str, pid: int) -> list[str]:
    """The telling lines of the log that process `pid` writes there (NCCL_DEBUG_FILE ends in `.PID.log`), in order."""
    lines: list[str] = []
    for path in sorted(glob.glob(os.path.join(glob.escape(directory), f"nccl.*.{pid}.log"))):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read(_MOST_BYTES)
        except OSError:
            continue
        lines += [line[:400] for line in text.splitlines() if _TELLING.search(line)]
    return lines[:_MOST_LINES]
