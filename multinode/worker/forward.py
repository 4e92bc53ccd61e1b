"""Finds the forward passes of trained models: calls of a model's wrapper (DDP, FSDP, DeepSpeed).

`phases` and `batches` decide what is done there. It wraps `__call__` instead of `forward`: torch.compile decides by the
function `forward` what to trace, and must find the original.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional

from .guard import Hooks

_Watch = Callable[[Callable[..., Any]], Callable[..., Any]]

# fully_shard's FSDPModule is in the second of its two modules in torch 2.4 and 2.5.
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
    ("torch.distributed.fsdp._fully_shard._fully_shard", "FSDPModule"),
    ("torch.distributed._composable.fsdp.fully_shard", "FSDPModule"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine"),
)
_NAMES = frozenset(name for _module, name in _WRAPPERS)


def hooks(watch: _Watch) -> Hooks:
    """Wrap the calls of wrapped models.

    Args:
        watch: given a class's `__call__`, returns its replacement. Wrapped models may contain others, as FSDP's units;
            their calls are wrapped, too.
    """
    return [
        *((module, functools.partial(_watch_calls, watch, name)) for module, name in _WRAPPERS),
        ("torch._dynamo.eval_frame", functools.partial(_watch_compiled, watch)),
    ]


def _watch_calls(watch: _Watch, name: str, module: Any) -> None:
    owner = getattr(module, name, None)
    if owner is not None:
        owner.__call__ = watch(_call_of(owner))


def _watch_compiled(watch: _Watch, module: Any) -> None:
    """Wrap the compiled module of torch.compile(DDP(model)), since calls inside it cannot be wrapped."""
    owner = getattr(module, "OptimizedModule", None)
    if owner is None:
        return
    plain = _call_of(owner)
    watched = watch(plain)

    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (watched if _is_wrapper(self) else plain)(self, *args, **kwargs)

    owner.__call__ = call


def _is_wrapper(compiled: Any) -> bool:
    original = getattr(compiled, "_orig_mod", None)
    return any(base.__name__ in _NAMES for base in type(original).__mro__)


def _call_of(owner: Any) -> Callable[..., Any]:
    own: Optional[Callable[..., Any]] = vars(owner).get("__call__")
    if own is not None:
        return own

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - it becomes the class's
        return super(owner, self).__call__(*args, **kwargs)

    return __call__
