"""Accelerators: what differs between vendors: variables, backend, sockets, query tool. Data only.

Sources: CUDA C++ Programming Guide, "CUDA Environment Variables"; ROCm, "GPU isolation techniques"; Level Zero,
"Affinity mask"; oneCCL and libfabric's tcp provider; CANN, "Environment variables". RCCL is NCCL for torch and uses its
variables. Only NVIDIA GPUs are sampled while a job runs; the other query tools are tested on captured output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple


class Accelerator(NamedTuple):
    """The accelerators of one vendor."""

    kind: str  # as a probe names it
    name: str  # for people
    visible: tuple[str, ...]  # the variables that select its devices, the usual one first
    backend: str  # of torch.distributed
    sockets: dict[str, str]  # how a variable names the interface of the backend's sockets
    family: str | None  # the variable that selects IPv6; None is none
    query: str  # the program that lists the devices
    order: dict[str, str]  # variables that make device numbers match that program's
    by_uuid: bool = False  # whether `visible` takes the UUIDs that it prints
    has_ras: bool = False  # whether the backend has NCCL's RAS service

    def counts_alike(self, env: Mapping[str, str]) -> bool:
        """Whether device numbers match those of `query` under `order` and the user's variables, which win."""
        return bool(self.order) and all(env.get(name, value) == value for name, value in self.order.items())


NVIDIA = Accelerator(
    kind="cuda",
    name="NVIDIA CUDA",
    visible=("CUDA_VISIBLE_DEVICES",),
    backend="nccl",
    # Without `=` it is a prefix: eth1 would match eth10.
    sockets={"NCCL_SOCKET_IFNAME": "={}"},
    family="NCCL_SOCKET_FAMILY",
    query="nvidia-smi",
    # CUDA numbers the fastest GPU first by default.
    order={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    by_uuid=True,
    has_ras=True,
)
ACCELERATORS = (
    NVIDIA,
    Accelerator(
        kind="rocm",
        name="AMD ROCm",
        # HIP numbers the devices that ROCr shows.
        visible=("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        backend="nccl",
        sockets={"NCCL_SOCKET_IFNAME": "={}"},
        family="NCCL_SOCKET_FAMILY",
        query="rocm-smi",
        order={},
        by_uuid=True,
    ),
    Accelerator(
        kind="xpu",
        name="Intel XPU",
        visible=("ZE_AFFINITY_MASK",),
        backend="xccl",
        sockets={"CCL_KVS_IFACE": "{}", "FI_TCP_IFACE": "{}"},
        family=None,
        query="xpu-smi",
        order={},
    ),
    Accelerator(
        kind="npu",
        name="Ascend NPU",
        visible=("ASCEND_RT_VISIBLE_DEVICES",),
        backend="hccl",
        # NCCL's syntax: prefixes, `^` and `=`.
        sockets={"HCCL_SOCKET_IFNAME": "={}"},
        family="HCCL_SOCKET_FAMILY",
        query="npu-smi",
        order={},
    ),
)

VISIBLE_DEVICES = tuple(dict.fromkeys(name for accelerator in ACCELERATORS for name in accelerator.visible))
"""The variables that select devices, of all vendors."""


def accelerator_named(kind: str | None) -> Accelerator:
    """The one of this kind; NVIDIA's if a node does not say."""
    return next((accelerator for accelerator in ACCELERATORS if accelerator.kind == kind), NVIDIA)


# Vendor and product line; the rest identifies the GPU.
_PASSED_OVER = frozenset({"nvidia", "geforce", "tesla"})
# Ampere workstation GPUs are named with and without RTX: `RTX A6000`, `A6000`.
_AMPERE_WORKSTATION = re.compile(r"RTX (A\d{4})\b", re.IGNORECASE)
_TRADE_MARK = re.compile(r"\((?:R|TM)\)", re.IGNORECASE)
# Words common to all CPUs, and the number of cores; of `2 x CPU` nothing else would remain.
_PROCESSOR = re.compile(r"(?<=\w )(?<! x )(?:\w+-Core )?(?:Processor|CPU)\b ?", re.IGNORECASE)
# The clock of a model with a number. A virtual machine's CPU may have only the clock.
_CLOCK = re.compile(r"(\d\w?) @ [\d.]+GHz")


def short_device_name(name: str) -> str:
    """The name without common words: `RTX 4090`, `A6000`, `V100-SXM2-16GB`, `Intel Xeon Platinum 8481C`.

    Unchanged if nothing would remain.
    """
    product = _CLOCK.sub(r"\1", _PROCESSOR.sub("", _TRADE_MARK.sub("", " ".join(name.split()))))
    words = [word for word in product.split() if word.casefold() not in _PASSED_OVER]
    return _AMPERE_WORKSTATION.sub(r"\1", " ".join(words or name.split()))


def device_key(name: str) -> str:
    """A key that two names of one device share; devices with different keys differ."""
    return short_device_name(name).casefold()
