"""Collective calls: which functions of torch.distributed communicate, and what a call of one carries.

S is counted as nccl-tests does: of an all-gather, a gather and a scatter what all workers have together, of a
reduce-scatter and an all-to-all what one worker puts in, of all else the tensor. Who calls, and when, is
multinode_traffic's.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

__all__ = ["FUNCTIONAL", "PACKAGE", "PROCESS_GROUP", "Call", "Kind", "present"]


_Reader = Callable[[Tuple[Any, ...], Dict[str, Any]], Any]


class Kind(NamedTuple):
    """What a function does, and which of its parameters says how much.

    Attributes:
        op: the collective, as CallCount names it.
        sized: the parameter that holds the tensor, or the tensors; none for a barrier, which carries nothing.
        shared: whether that is one worker's share of S.
        group: the parameter that holds the process group.
    """

    op: str
    sized: str = ""
    shared: bool = False
    group: str = "group"


# Not here, because they call others of these for each of their parts: batch_isend_irecv, the collectives of objects.
PROCESS_GROUP: Dict[str, Kind] = {
    "all_reduce": Kind("all_reduce", "tensor"),
    "all_reduce_coalesced": Kind("all_reduce", "tensors"),
    "all_gather": Kind("all_gather", "tensor_list"),
    "all_gather_into_tensor": Kind("all_gather", "output_tensor"),
    "all_gather_single": Kind("all_gather", "output_tensor"),
    "_all_gather_base": Kind("all_gather", "output_tensor"),
    "all_gather_coalesced": Kind("all_gather", "output_tensor_lists"),
    "reduce_scatter": Kind("reduce_scatter", "input_list"),
    "reduce_scatter_tensor": Kind("reduce_scatter", "input"),
    "reduce_scatter_single": Kind("reduce_scatter", "input"),
    "_reduce_scatter_base": Kind("reduce_scatter", "input"),
    "broadcast": Kind("broadcast", "tensor"),
    "all_to_all": Kind("all_to_all", "input_tensor_list"),
    "all_to_all_single": Kind("all_to_all", "input"),
    "reduce": Kind("reduce", "tensor"),
    "gather": Kind("gather", "tensor", shared=True),
    "scatter": Kind("scatter", "tensor", shared=True),
    "send": Kind("send", "tensor"),
    "isend": Kind("send", "tensor"),
    "recv": Kind("recv", "tensor"),
    "irecv": Kind("recv", "tensor"),
    "barrier": Kind("barrier"),
    "monitored_barrier": Kind("barrier"),
}
"""Of torch.distributed.distributed_c10d, which torch.distributed hands on."""

PACKAGE: Dict[str, Kind] = {"_broadcast_coalesced": Kind("broadcast", "tensors", group="process_group")}
"""Of torch.distributed itself: DDP's buffers and its first parameters. Flattened to buckets inside; counted as one."""

FUNCTIONAL: Dict[str, Kind] = {
    "all_reduce": Kind("all_reduce", "self"),
    "all_reduce_coalesced": Kind("all_reduce", "self"),
    "all_gather_single": Kind("all_gather", "self", shared=True),
    "all_gather_single_coalesced": Kind("all_gather", "self", shared=True),
    "all_gather_tensor": Kind("all_gather", "self", shared=True),
    "all_gather_tensor_autograd": Kind("all_gather", "self", shared=True),
    "all_gather_into_tensor_coalesced": Kind("all_gather", "self", shared=True),
    "reduce_scatter_single": Kind("reduce_scatter", "self"),
    "reduce_scatter_single_coalesced": Kind("reduce_scatter", "inputs"),
    "reduce_scatter_tensor": Kind("reduce_scatter", "self"),
    "reduce_scatter_tensor_autograd": Kind("reduce_scatter", "self"),
    "reduce_scatter_tensor_coalesced": Kind("reduce_scatter", "inputs"),
    "all_to_all_single": Kind("all_to_all", "self"),
    "all_to_all_single_autograd": Kind("all_to_all", "self"),
    "broadcast": Kind("broadcast", "self"),
}
"""Of torch.distributed._functional_collectives: what DTensor calls."""

# pybind11's functions have no signature that Python can read.
_BUILTIN_PARAMETERS = {"_broadcast_coalesced": ["process_group", "tensors", "buffer_size", "src"]}


class Call:
    """Reads the arguments of one function's calls.

    Args:
        function: the function.
        kind: what it does.

    Attributes:
        op: the collective.
        shared: as Kind has it.
        tensors: of a call's args and kwargs, the tensor or the tensors that say how much; None of a barrier.
        group: likewise the process group as it was given; None is the default group.
        tag: likewise what a functional collective tells groups of the same ranks apart by.

    Raises:
        ValueError: it has no parameter of that name.
    """

    def __init__(self, function: Callable[..., Any], kind: Kind) -> None:
        name = function.__name__
        parameters = _BUILTIN_PARAMETERS.get(name) or list(inspect.signature(function).parameters)
        for wanted in (kind.sized, kind.group):
            if wanted and wanted not in parameters:
                raise ValueError("%s has no parameter %s" % (name, wanted))
        self.op = kind.op
        self.shared = kind.shared
        self.tensors = _reader(parameters, kind.sized)
        self.group = _reader(parameters, kind.group)
        self.tag = _reader(parameters, "tag")
        self._asynchronous = _reader(parameters, "async_op")
        # These two return while their work goes on, and say so by their names alone.
        self._never_waits = name in ("isend", "irecv")

    def waits(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> bool:
        """Whether what follows it waits for it: it is not asynchronous."""
        return not (self._never_waits or self._asynchronous(args, kwargs))


def _reader(parameters: List[str], name: str) -> _Reader:
    position = parameters.index(name) if name in parameters else len(parameters)

    def read(args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        return args[position] if position < len(args) else kwargs.get(name)

    return read


def present(module: Any, kinds: Dict[str, Kind]) -> Dict[str, Kind]:
    """Those functions that this torch has; of two names of one function, where the older warns, only the newer."""
    return {name: kind for name, kind in kinds.items() if hasattr(module, name) and not _hands_on(module, name)}


def _hands_on(module: Any, name: str) -> bool:
    # Such a functional collective warns of its age, pointing at its caller, and calls the newer one: were it wrapped,
    # the warning would point at us.
    newer = name.replace("_into_tensor", "_single").replace("_tensor", "_single")
    return module.__name__.endswith("_functional_collectives") and newer != name and hasattr(module, newer)
