"""Collective hooks: wraps torch.distributed's functions, to count their calls and to time who waits in them.

On the CPU the host waits, in the phase `comm`; on a GPU the computing stream does (multinode_device_waits). Which
functions these are is multinode_collective_calls' to say.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any, Callable, Dict, List, Optional, Tuple

import multinode_collective_calls as calls
import multinode_device_waits
import multinode_guard
import multinode_own_frames
import multinode_phases
import multinode_recorder
import multinode_steps
from multinode_imports import Action

__all__ = ["CollectiveHooks"]

_Ended = Callable[[], None]
_GroupOf = Callable[[Any, Any], Any]
_Count = Callable[[str, Any, float], None]


class _Nesting(threading.local):
    inside = False


class CollectiveHooks:
    """Replaces functions of torch.distributed by ones that count and time their outermost calls.

    Args:
        steps: whose phases the host's waits are.
        guard: keeps what fails in here.
        count: called with a collective's name, the process group (None: the default one) and S in bytes.
        device: times waits on a GPU.
    """

    def __init__(
        self,
        steps: multinode_steps.Steps,
        guard: multinode_guard.Guard,
        count: _Count,
        device: multinode_device_waits.DeviceWaits,
    ) -> None:
        self._phases = steps.phases
        self._guard = guard
        self._count = count
        self._device = device
        self._nesting = _Nesting()

    def hooks(self) -> List[Tuple[str, Action]]:
        """Modules to wait for, and what is then done with each.

        The first of them is wrapped before anybody has copied its functions: torch.distributed, torch.compile's table
        of collectives (which knows them by identity) and DeepSpeed all take ours.
        """
        return [
            ("torch.distributed.distributed_c10d", self._hook_process_groups),
            ("torch.distributed", self._hook_package),
            ("torch.distributed._functional_collectives", self._hook_functional),
            ("torch._dynamo.eval_frame", _hook_compiler),
        ]

    def _hook_process_groups(self, module: Any) -> None:
        self._replace(module, calls.PROCESS_GROUP)
        module.Work.wait = self._timed(module.Work.wait)

    def _hook_package(self, module: Any) -> None:
        self._replace(module, calls.PACKAGE)

    def _hook_functional(self, module: Any) -> None:
        self._replace(module, calls.FUNCTIONAL, functools.partial(_group_of, module))
        module.wait_tensor = self._timed(module.wait_tensor)

    def _replace(self, module: Any, kinds: Dict[str, calls.Kind], group_of: Optional[_GroupOf] = None) -> None:
        for name, kind in calls.present(module, kinds).items():
            function = getattr(module, name)
            try:
                setattr(module, name, self._counted(function, calls.Call(function, kind), group_of))
            except Exception as error:  # noqa: BLE001 - the other functions can be counted all the same
                self._guard.tell("counting the calls of %s.%s" % (module.__name__, name), error)

    def _counted(
        self, function: Callable[..., Any], call: calls.Call, group_of: Optional[_GroupOf]
    ) -> Callable[..., Any]:
        """The function, with its outermost calls counted and timed."""
        torch = sys.modules["torch"]
        nesting = self._nesting

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            # torch.compile traces what it is given: it folds this to the call of its own.
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            if nesting.inside:
                return function(*args, **kwargs)
            nesting.inside = True
            ended = None
            try:
                tensors = call.tensors(args, kwargs)
                ended = self._begin(call, tensors, args, kwargs)
                result = function(*args, **kwargs)
            finally:
                nesting.inside = False
                if ended is not None:
                    self._end(ended)
            try:
                group = call.group(args, kwargs)
                if group_of is not None:
                    group = group_of(group, call.tag(args, kwargs))
                size_bytes = _size_bytes(tensors)
                self._count(call.op, group, size_bytes * _workers(group) if call.shared else size_bytes)
            except Exception as error:  # noqa: BLE001 - a training never stops because it is being watched
                self._guard.tell("counting a collective", error)
            return result

        return counted

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function that waits for a collective, timed unless a collective that is timed already calls it."""
        torch = sys.modules["torch"]
        nesting = self._nesting

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            if nesting.inside:
                return function(*args, **kwargs)
            ended = self._begin_wait()
            try:
                return function(*args, **kwargs)
            finally:
                if ended is not None:
                    self._end(ended)

        return timed

    def _begin(self, call: calls.Call, tensors: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Optional[_Ended]:
        try:
            while isinstance(tensors, (list, tuple)) and tensors:
                tensors = tensors[0]
            # On a GPU the host goes on at once, and its time says nothing.
            if getattr(tensors, "is_cuda", False):
                return self._device.begin() if call.waits(args, kwargs) else None
            return self._phases.leave if self._phases.enter("comm") else None
        except Exception as error:  # noqa: BLE001 - see _counted
            self._guard.tell("timing a collective", error)
            return None

    def _begin_wait(self) -> Optional[_Ended]:
        # A Work does not say which device it is of: both are timed, and one of the two waits for next to nothing.
        try:
            device_ended = self._device.begin()
            if not self._phases.enter("comm"):
                return device_ended
            if device_ended is None:
                return self._phases.leave
            return functools.partial(_end_both, self._phases.leave, device_ended)
        except Exception as error:  # noqa: BLE001 - see _counted
            self._guard.tell("timing a wait", error)
            return None

    def _end(self, ended: _Ended) -> None:
        try:
            ended()
        except Exception as error:  # noqa: BLE001 - see _counted
            self._guard.tell("timing a collective", error)


def _hook_compiler(module: Any) -> None:
    ours = (calls, multinode_device_waits, multinode_phases, multinode_recorder, multinode_steps)
    names = {__name__, "multinode_traffic", *(one.__name__ for one in ours)}
    multinode_own_frames.run_as_they_are([sys.modules[name] for name in names if name in sys.modules], module.skip_code)


def _end_both(first: _Ended, second: _Ended) -> None:
    try:
        first()
    finally:
        second()


def _size_bytes(tensors: Any) -> int:
    if isinstance(tensors, (list, tuple)):
        return sum(map(_size_bytes, tensors))
    return 0 if tensors is None else tensors.nbytes


def _workers(group: Any) -> int:
    """How many are in a group; 0 in one that this worker is not in, for which a number stands."""
    return int(sys.modules["torch"].distributed.get_world_size(group)) if not isinstance(group, int) else 0


def _group_of(functional: Any, group: Any, tag: Any) -> Any:
    """The process group that a functional collective was given in one of its many ways.

    What is only traced calls them too, without anything being sent: then, as for groups without this worker, a number.
    """
    c10d = functional.c10d
    if functional._are_we_tracing():  # noqa: SLF001 - torch asks itself so
        return c10d.GroupMember.NON_GROUP_MEMBER
    if isinstance(group, str):
        return c10d._resolve_process_group(group)  # noqa: SLF001 - a name is resolved so
    if isinstance(group, tuple):
        mesh, dimension = group
        return mesh.get_group(dimension)
    if isinstance(group, list):
        return c10d._find_pg_by_ranks_and_tag(tag or "", group)  # noqa: SLF001 - ranks are resolved so
    return group.get_group() if hasattr(group, "get_group") else group
