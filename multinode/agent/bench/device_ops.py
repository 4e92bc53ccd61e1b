"""What is measured on a device: matrix products, memory bandwidth and transformer layers, each as a call to repeat.

Needs torch, given by the caller. Times nothing; FLOPs and bytes are counted by the controller, from the sizes here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Optional

from ..channel import Record
from ..facts.memory import MemoryReader
from .device_layers import LAYERS, layer_shape, make_layer

__all__ = ["DeviceOp", "list_ops"]

_DTYPES = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# The first generation of NVIDIA's with tensor cores for these.
_AMPERE = 8
_SIZES = {"cuda": (1024, 2048, 4096, 8192), "cpu": (256, 512, 1024, 2048)}
_MIB, _GIB = 1 << 20, 1 << 30
_CACHE = "/sys/devices/system/cpu/cpu0/cache/index3/size"
# Buffers far beyond any cache, and few enough parts of the memory for several workers to have some.
_BEYOND_CACHE, _OF_MEMORY = 4, 16


class DeviceOp(NamedTuple):
    """One thing to measure.

    Attributes:
        fields: of its record.
        make: makes what is to be called again and again; its buffers live as long as that does.
    """

    fields: Record
    make: Callable[[], Callable[[], Any]]


def list_ops(torch: Any, request: Record, device: Any) -> Iterator[DeviceOp]:
    """All that the request asks for on this device, small matrices before large ones.

    Args:
        torch: the module.
        request: a DeviceTest.
        device: torch's.
    """
    offered = _offered(torch, device)
    for op in _asked_ops(torch, request, device, offered):
        is_lacking = op.fields["dtype"] not in offered and op.fields["test"] in {"matmul", *LAYERS}
        yield op._replace(make=partial(_refuse, op.fields["dtype"])) if is_lacking else op


def _refuse(dtype: str) -> Callable[[], Any]:
    raise TypeError(f"this device does not compute with {dtype}")


def _asked_ops(torch: Any, request: Record, device: Any, offered: tuple[str, ...]) -> Iterator[DeviceOp]:
    """All, whether the device has their types or not; where none are asked for, those of the types that it has."""
    dtypes = request["dtypes"] or [dtype for dtype in _DTYPES if dtype in offered]
    if "matmul" in request["kinds"]:
        for dtype in dtypes:
            for size in request["sizes"] or _SIZES[device.type]:
                fields = {"test": "matmul", "dtype": dtype, "size": size}
                yield DeviceOp(fields, partial(_matmul, torch, device, dtype, size))
    if "memory" in request["kinds"]:
        yield from _memory_ops(torch, device)
    if "layers" in request["kinds"]:
        for dtype in dtypes if request["dtypes"] else [_of_trainings(torch, device)]:
            for name in LAYERS:
                yield from _layer_ops(torch, device, name, dtype)


def _offered(torch: Any, device: Any) -> tuple[str, ...]:
    """The types that the device computes with."""
    if device.type == "cpu":
        return ("fp32", "fp16", "bf16")
    # The numbers of AMD's GPUs mean something else.
    if torch.version.hip is not None:
        return ("fp32", "fp16", "bf16")
    return tuple(_DTYPES) if torch.cuda.get_device_capability(device)[0] >= _AMPERE else ("fp32", "fp16")


def _of_trainings(torch: Any, device: Any) -> str:
    if device.type == "cpu":
        return "fp32"
    return "bf16" if "bf16" in _offered(torch, device) else "fp16"


def _set_type(torch: Any, dtype: str) -> Any:
    """The type as torch has it; tensor cores multiply fp32 matrices where tf32 is meant, and nowhere else."""
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    return getattr(torch, _DTYPES[dtype])


def _matmul(torch: Any, device: Any, dtype: str, size: int) -> Callable[[], Any]:
    kind = _set_type(torch, dtype)
    # Random numbers: a chip multiplies zeros with less power, and so at higher clocks.
    left, right = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
    return partial(torch.mm, left, right, out=torch.empty_like(left))


def _memory_ops(torch: Any, device: Any) -> Iterator[DeviceOp]:
    """A copy; the triad a = b + s * c, which reads two buffers and writes one; and to a GPU and back over its bus."""
    kinds: dict[str, Callable[..., Callable[[], Any]]] = {"copy": _copy, "triad": _triad}
    if device.type == "cuda":
        kinds |= {"to_device": _to_device, "from_device": _from_device}
    count = _buffer_bytes(torch, device) // 4
    for test, make in kinds.items():
        fields = {"test": test, "dtype": "fp32", "size": count, "width_bytes": 4}
        yield DeviceOp(fields, partial(make, torch, device, count))


def _copy(torch: Any, device: Any, count: int) -> Callable[[], Any]:
    source = torch.randn(count, device=device)
    return partial(torch.empty_like(source).copy_, source)


def _triad(torch: Any, device: Any, count: int) -> Callable[[], Any]:
    first, second = torch.randn(count, device=device), torch.randn(count, device=device)
    return partial(torch.add, first, second, alpha=3.0, out=torch.empty_like(first))


def _to_device(torch: Any, device: Any, count: int) -> Callable[[], Any]:
    source = torch.zeros(count, pin_memory=True)
    return partial(torch.empty(count, device=device).copy_, source, non_blocking=True)


def _from_device(torch: Any, device: Any, count: int) -> Callable[[], Any]:
    source = torch.zeros(count, device=device)
    return partial(torch.empty(count, pin_memory=True).copy_, source, non_blocking=True)


def _layer_ops(torch: Any, device: Any, name: str, dtype: str) -> Iterator[DeviceOp]:
    sizes = layer_shape(name, device.type)._asdict()
    for backward in (False, True):
        fields = {"test": name, "dtype": dtype, "backward": backward, **sizes}
        yield DeviceOp(fields, partial(_layer, torch, device, (name, dtype), backward=backward))


def _layer(torch: Any, device: Any, which: tuple[str, str], *, backward: bool) -> Callable[[], Any]:
    name, dtype = which
    return make_layer(torch, name, device, _set_type(torch, dtype))[backward]


def _buffer_bytes(torch: Any, device: Any) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(min(_GIB, free // _OF_MEMORY))
    wanted = max(128 * _MIB, _BEYOND_CACHE * (_cache_bytes() or 0))
    return min(wanted, _GIB, MemoryReader().read().available // _OF_MEMORY)


def _cache_bytes() -> Optional[int]:
    """The largest cache of a processor; None where the kernel does not tell."""
    with contextlib.suppress(OSError, ValueError), open(_CACHE, encoding="ascii") as file:
        return int(file.read().strip().removesuffix("K")) << 10
    return None
