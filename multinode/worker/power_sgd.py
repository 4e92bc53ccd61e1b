"""PowerSGD: each gradient matrix travels as two thin ones, and what is lost is added to the next (arXiv:1905.13727).

torch's own hook chains its collectives through callbacks of futures, which gloo runs in any order: those of two
buckets cross and abort. Here a bucket's collectives wait for those of the bucket before it, on the CPU in a thread and
a group of their own, so that the backward pass continues and DDP's own collectives do not cross them. Errors are
kept by parameter: how DDP cuts its buckets changes nothing.
"""

from __future__ import annotations

import concurrent.futures
import sys
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

_NAME = "powersgd"
# torch's: what does not become half as large stays as it is.
_LEAST_RATE = 2


class Choice(NamedTuple):
    """`powersgd[:RANK[:START]]`."""

    rank: int = 4  # columns of the thin matrices
    start: int = 10  # iterations before it begins, in which gradients travel as they are


def read_choice(kind: str) -> Optional[Choice]:
    """What follows `--grad-compress`; None where it is no PowerSGD."""
    name, *numbers = kind.split(":")
    return Choice(*map(int, numbers)) if name == _NAME else None


def is_worth_it(parameter: Any, rank: int) -> bool:
    """Whether a gradient is a matrix that becomes less than half as large."""
    if parameter.dim() < 2 or not parameter.is_floating_point():  # noqa: PLR2004 - a matrix has two
        return False
    rows = parameter.shape[0]
    columns = parameter.numel() // max(1, rows)
    return bool(rows * columns > (rows + columns) * rank * _LEAST_RATE)


class PowerSgd:
    """What one DDP module's gradients become.

    Args:
        module: the DDP module, which is not kept.
        choice: rank and start.
        count: told what is sent, by `count(op, group, size_bytes, source="ddp")`.
    """

    def __init__(self, module: Any, choice: Choice, count: Callable[..., None]) -> None:
        self._is_cpu = module.device_type == "cpu"
        self._group = _own_group(module.process_group) if self._is_cpu else module.process_group
        self._choice = choice
        self._count = count
        self._numbers = {id(each): number for number, each in enumerate(module.parameters())}
        self._thread: Optional[concurrent.futures.ThreadPoolExecutor] = None
        self._errors: Dict[int, Any] = {}
        self._queries: Dict[int, Any] = {}
        self.iteration = 0  # backward passes that were reduced

    def send(self, bucket: Any) -> Any:
        """A communication hook's part: a future of the bucket's mean over the workers, as far as it is sent."""
        futures = sys.modules["torch"].futures
        buffer, gradients = bucket.buffer(), bucket.gradients()
        numbers = [self._numbers[id(each)] for each in bucket.parameters()]
        compresses = self.iteration >= self._choice.start
        self.iteration += bucket.is_last()
        future = futures.Future() if self._is_cpu else futures.Future(devices=[buffer.device])
        if not self._is_cpu:
            # NCCL has the stream wait, and not the host.
            future.set_result(self._reduce(buffer, gradients, numbers, compresses=compresses))
            return future
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "multinode-powersgd")
        self._thread.submit(self._fulfil, future, buffer, gradients, numbers, compresses)
        return future

    def state(self) -> Dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"iteration": self.iteration, "errors": dict(self._errors), "queries": dict(self._queries)}

    def load(self, state: Dict[str, Any], device: Any) -> None:
        """Take up what `state` gave."""
        self.iteration = state["iteration"]
        self._errors = {number: each.to(device) for number, each in state["errors"].items()}
        self._queries = {number: each.to(device) for number, each in state["queries"].items()}

    def _fulfil(self, future: Any, buffer: Any, gradients: List[Any], numbers: List[int], compresses: bool) -> None:  # noqa: FBT001 - handed on by a thread pool
        try:
            future.set_result(self._reduce(buffer, gradients, numbers, compresses=compresses))
        except Exception as error:  # noqa: BLE001 - it ends the training where DDP waits for the future
            future.set_exception(error)

    def _reduce(self, buffer: Any, gradients: List[Any], numbers: List[int], *, compresses: bool) -> Any:
        with sys.modules["torch"].no_grad():
            pairs = list(zip(numbers, gradients))
            thin = [pair for pair in pairs if compresses and is_worth_it(pair[1], self._choice.rank)]
            if not thin:
                return self._mean(buffer)
            named = {number for number, _ in thin}
            self._mean_of([gradient for number, gradient in pairs if number not in named])
            self._approximate(thin)
            return buffer

    def _approximate(self, thin: List[Tuple[int, Any]]) -> None:
        """Replace gradients by the mean of their approximations; what is lost is kept for the next step."""
        torch = sys.modules["torch"]
        wholes = []
        for number, gradient in thin:
            whole = gradient.float().reshape(gradient.shape[0], -1)
            if number in self._errors:
                whole = whole + self._errors[number]
            wholes.append(whole)
        queries = [self._query(number, whole) for (number, _), whole in zip(thin, wholes)]
        left = [whole @ query for whole, query in zip(wholes, queries)]
        self._mean_of(left)
        left = [torch.linalg.qr(each)[0] for each in left]
        right = [whole.t() @ each for whole, each in zip(wholes, left)]
        self._mean_of(right)
        for (number, gradient), whole, one, other in zip(thin, wholes, left, right):
            mean = one @ other.t()
            self._errors[number] = whole - mean
            self._queries[number] = other.clone()
            gradient.copy_(mean.view(gradient.shape))

    def _query(self, number: int, whole: Any) -> Any:
        """The right factor of the step before; at first the same random one on all workers."""
        torch = sys.modules["torch"]
        if number not in self._queries:
            generator = torch.Generator().manual_seed(number)
            self._queries[number] = torch.randn(whole.shape[1], self._choice.rank, generator=generator).to(whole.device)
        return torch.linalg.qr(self._queries[number])[0]

    def _mean_of(self, tensors: List[Any]) -> None:
        """Replace each by its mean over the workers, all in one call; of nothing there is none."""
        torch = sys.modules["torch"]
        if sum(each.numel() for each in tensors):
            flat = self._mean(torch.cat([each.reshape(-1) for each in tensors]))
            for each, part in zip(tensors, flat.split([each.numel() for each in tensors])):
                each.copy_(part.view(each.shape))

    def _mean(self, tensor: Any) -> Any:
        tensor.div_(self._group.size())
        self._group.allreduce([tensor]).wait()
        self._count("all_reduce", self._group, tensor.nbytes, source="ddp")
        return tensor


def _own_group(group: Any) -> Any:
    """Another group of the same workers, which make it together."""
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    return c10d.new_group(c10d.get_process_group_ranks(group), use_local_synchronization=True)
