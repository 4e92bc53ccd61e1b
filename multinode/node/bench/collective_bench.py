"""Collective benchmark: a worker under torchrun that times collectives and checks their values.

It needs torch, so it runs in the job's environment, as `torchrun <agent.pyz> collectives`, with its request in
MULTINODE_REQUEST. It records every raw iteration; the controller computes bandwidths. A warm-up keeps connecting out of
the timings. There is no barrier between iterations, since its skew would be timed, too. A message may alternate with
raw TCP between the nodes, so that other traffic affects both alike.
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
# Shares of a buffer are aligned to this, as in nccl-tests.
_ALIGN_BYTES = 16
# Values are made and compared in pieces: the buffers may leave little free memory.
_PIECE = 1 << 22


class Operation(ABC):
    """One collective on buffers of one size.

    Args:
        torch: the module.
        name: the collective.
        size_bytes: requested S.
        request: `dtype` and `redop`.
        device: where the buffers are.

    Attributes:
        count: number of elements, as nccl-tests counts them.
        size_bytes: S, rounded down to a multiple of the workers.
        reduces: whether `redop` matters.
    """

    reduces = False
    # `shared`: S is the size of all workers' shares, and `sends_all` and `receives_all` tell which buffers have that
    # size. `in_place`: both buffers are one.
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
        """Expected values of `received` at these indices after `run`."""

    def clear(self) -> None:
        """Make all buffers zero again."""
        self.sent.zero_()
        self.received.zero_()

    def count_wrong(self) -> int:
        """Run once on values that differ by index and rank; returns the number of wrong elements."""
        self.received.zero_()
        self._pieces(self.sent, lambda piece, index: piece.copy_(self.value(index, self.rank)))
        self.run()
        wrong = 0

        def compare(piece: Any, index: Any) -> None:
            nonlocal wrong
            expected = self.expect(index)
            # Only an average divides, so its last bits may differ.
            same = (
                self.torch.isclose(piece.double(), expected.double(), rtol=self._rounding())
                if self.reduces and self.redop == "avg"
                else piece == expected.to(self.dtype)
            )
            wrong += int((~same).sum().item())

        self._pieces(self.received, compare)
        return wrong

    def value(self, index: Any, rank: int) -> Any:
        """Values that `rank` sends at these indices, small enough that reductions over all ranks are exact."""
        if self.reduces and self.redop == "prod":
            return 1 + (index + rank) % 2 if rank < self._doublings() else self.torch.ones_like(index)
        return index % self._period() + rank % self._period()

    def reduced(self, index: Any) -> Any:
        """The reduction of all ranks' values at these indices."""
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
        """The torch.distributed.ReduceOp."""
        return getattr(self.dist.ReduceOp, _REDOPS.get(self.redop, self.redop.upper()))

    def _zeros(self, *, everything: bool) -> Any:
        """A buffer of zeros, which stay zeros however often they are reduced."""
        count = self.count * (self.ranks if everything else 1)
        return self.torch.zeros(count, dtype=self.dtype, device=self.device)

    def _rounding(self) -> float:
        """Relative tolerance of an average: its sum is rounded once per rank."""
        rounding: float = self.torch.finfo(self.dtype).eps * (self.ranks + 1)
        return rounding

    def _doublings(self) -> int:
        """The number of factors 2 that a product may have."""
        return self._largest.bit_length() - 1

    def _period(self) -> int:
        # With a period below two, all values would be equal.
        share: int = self._largest // (2 * self.ranks)
        return max(2, min(_PERIOD, share))

    @property
    def _largest(self) -> int:
        """The largest number up to which the type represents all integers exactly."""
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
    """nccl-tests' ring: each rank sends to the next rank and receives from the previous one at once."""

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
        torch: the module, with an initialized process group.
        request: `collective`, `size_bytes`, `dtype`, `redop`.
        device: where the buffers are.
    """
    return _OPERATIONS[request["collective"]](torch, request, device)


def _share(elements: int, align: int) -> int:
    return max(1, elements // align * align or elements)


# Lines that NCCL_DEBUG=INFO prints once per communicator or connection (NCCL's init.cc, net_socket.cc, net_ib.cc).
_TELLING = re.compile(
    r"NCCL version|Bootstrap ?:|NET/|NET plugin|Using network| via |Channel \d+/\d+ :|Trees \[|coll channels"
)
_MOST_LINES = 400
_MOST_BYTES = 4 << 20
# Torch's device type for each backend that needs one.
_DEVICE_KINDS = {"nccl": "cuda", "xccl": "xpu", "hccl": "npu"}
# A core may limit TCP over one connection, but not over several.
_CONNECTIONS = (1, 4)


def main() -> None:
    """Run the requested size scan, and write one record per message to this worker's samples."""
    import torch
    import torch.distributed as dist

    request = json.loads(os.environ["MULTINODE_REQUEST"])
    backend = request["backend"] or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "hccl":
        # The import registers the device and the backend.
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
    # After an error this is not called: it would wait for the others, which hang in a collective, and hide the error.
    dist.destroy_process_group()


def join_group(dist: Any, backend: str, device: Any) -> None:
    """Join the process group; NCCL gets the worker's GPU, which it would otherwise guess from the global rank.

    With `device_id`, torch creates NCCL's communicator at once, so that no timed collective waits for it.
    """
    dist.init_process_group(backend, **({"device_id": device} if backend == "nccl" else {}))


class _CollectiveWorker:
    """This process among the workers.

    Args:
        torch: the module, with an initialized process group.
        device: device of the buffers.
        request: the size scan.
    """

    def __init__(self, torch: Any, device: Any, request: dict[str, Any]) -> None:
        # Torch's module of the device, as torch.cuda; None for the CPU.
        self.module = getattr(torch, device.type) if device.type != "cpu" else None
        self._torch = torch
        self._dist = torch.distributed
        self._device = device
        self._request = request
        self._rank = self._dist.get_rank()
        self._local_rank = int(os.environ["LOCAL_RANK"])
        self._ring: Optional[RawRing] = None

    def join_ring(self) -> None:
        """Connect the first workers of all nodes to a ring, and time round trips."""
        ring = RawRing(self._request["addr"]) if self._local_rank == 0 else None
        places = self._gather_places(ring)
        if ring is not None:
            ring.join(places)
            self._ring = ring
            for result in ring.ping():
                self.record({"kind": "ping", "times_us": result["times_us"], "error": result["error"]})
        self._dist.barrier()

    def measure(self, index: int, message: dict[str, Any]) -> dict[str, Any]:
        """Verify, warm up and time one message; returns its record."""
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
            # The first worker to leave the barrier would wait for the others, so one run after it is not timed.
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
        """Stream over TCP before a turn. After a failure there are no more: all workers wait for its deadline."""
        for count in _CONNECTIONS:
            results = self._ring.stream(count) if self._ring is not None else []
            if results:
                figures = [{name: result.get(name) for name in ("size_bytes", "time_s", "error")} for result in results]
                self.record({"kind": "stream", "index": index, "results": figures})
            if any(result["error"] is not None for result in results):
                self._ring = None

    def _write_rdma(self, index: int, before: Optional[Counters]) -> None:
        """Write over the RDMA ports that the warm-up used, if every node has such ports and the program."""
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
        # A node must not end its servers while another one writes to them.
        self._dist.barrier()
        if ring is not None:
            ring.close()

    def _gather_places(self, ring: Union[RawRing, RdmaRing, None]) -> list[Any]:
        """Places of all nodes, in node-rank order; None for a node without one."""
        # Workers other than a node's first one contribute an empty tuple.
        places: list[Any] = [()] * self._dist.get_world_size()
        mine = None if ring is None else ring.place
        self._dist.all_gather_object(places, mine if self._local_rank == 0 else ())
        return [place for place in places if place != ()]

    def _time(self, operation: Operation, iters: int) -> list[float]:
        """Microseconds of each of `iters` consecutive calls."""
        if self.module is not None:
            return [seconds * 1e6 for seconds in time_events(self.module, operation.run, 1, iters)]
        times_us = []
        for _ in range(iters):
            began = time.perf_counter_ns()
            operation.run()
            times_us.append((time.perf_counter_ns() - began) / 1000)
        return times_us

    def _agree_iters(self, warm_us: list[float]) -> int:
        """The requested number of iterations, or fewer if they would take too long; equal on all workers."""
        slowest = self._torch.tensor([min(warm_us, default=0.0)], dtype=self._torch.float32, device=self._device)
        self._dist.all_reduce(slowest, op=self._dist.ReduceOp.MAX)
        if slowest.item() <= 0:
            return int(self._request["iters"])
        affordable = int(self._request["max_seconds"] * 1e6 / slowest.item())
        return int(min(self._request["iters"], max(self._request["min_iters"], affordable)))

    def _read_nics(self) -> Optional[Counters]:
        """The node's NIC counters while no worker sends; only its first worker reads them."""
        if self.module is not None:
            self.module.synchronize()
        self._dist.barrier()
        nics = read_nics() if self._local_rank == 0 else None
        # No worker sends before all nodes have read.
        self._dist.barrier()
        return nics


def read_nccl_log(directory: str, pid: int) -> list[str]:
    """Lines about communicators and connections in the NCCL log of a process (NCCL_DEBUG_FILE ends in `.PID.log`)."""
    lines: list[str] = []
    for path in sorted(glob.glob(os.path.join(glob.escape(directory), f"nccl.*.{pid}.log"))):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read(_MOST_BYTES)
        except OSError:
            continue
        lines += [line[:400] for line in text.splitlines() if _TELLING.search(line)]
    return lines[:_MOST_LINES]
