"""Accelerators: what differs between vendors, one entry each: variables, backend, sockets, query tool. Data only.

Sources: CUDA C++ Programming Guide, "CUDA Environment Variables"; ROCm, "GPU isolation techniques"; Level Zero,
"Affinity mask"; oneCCL and libfabric's tcp provider; CANN, "Environment variables". RCCL is NCCL for torch, with its
variables. NVIDIA's alone are sampled while a job runs; the others' query tools are tested on captured output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple


class Accelerator(NamedTuple):
    """One vendor's.

    Attributes:
        kind: as a probe names it.
        name: for people.
        visible: the variable that chooses its devices, and others that hide some of those that it shows.
        backend: of torch.distributed.
        sockets: how a variable names the interface that the backend's sockets use.
        family: the variable that has them take IPv6; None is none.
        query: the program that lists the devices.
        order: variables that make devices count as that program counts them.
        by_uuid: whether `visible` takes the UUIDs that it prints.
        has_ras: whether the backend has NCCL's RAS service.
    """

    kind: str
    name: str
    visible: tuple[str, ...]
    backend: str
    sockets: dict[str, str]
    family: str | None
    query: str
    order: dict[str, str]
    by_uuid: bool = False
    has_ras: bool = False

    def counts_alike(self, env: Mapping[str, str]) -> bool:
        """Whether devices count as `query` lists them, under `order` and these variables of the user, which win."""
        return bool(self.order) and all(env.get(name, value) == value for name, value in self.order.items())


NVIDIA = Accelerator(
    kind="cuda",
    name="NVIDIA CUDA",
    visible=("CUDA_VISIBLE_DEVICES",),
    backend="nccl",
    # Without `=` it is a prefix: eth1 would take eth10.
    sockets={"NCCL_SOCKET_IFNAME": "={}"},
    family="NCCL_SOCKET_FAMILY",
    query="nvidia-smi",
    # CUDA counts the fastest GPU first unless told otherwise.
    order={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    by_uuid=True,
    has_ras=True,
)
ACCELERATORS = (
    NVIDIA,
    Accelerator(
        kind="rocm",
        name="AMD ROCm",
        # HIP's own count those that ROCr shows.
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
        # As NCCL reads it: prefixes, `^` and `=`.
        sockets={"HCCL_SOCKET_IFNAME": "={}"},
        family="HCCL_SOCKET_FAMILY",
        query="npu-smi",
        order={},
    ),
)


def accelerator_named(kind: str | None) -> Accelerator:
    """The one of this kind; NVIDIA's where a node does not say, as those before this table did."""
    return next((one for one in ACCELERATORS if one.kind == kind), NVIDIA)


# The maker of GPUs and the line of products; what is left tells one GPU from another.
_PASSED_OVER = frozenset({"nvidia", "geforce", "tesla"})
# A workstation card of the Ampere line is called with and without RTX: `RTX A6000`, `A6000`.
_AMPERE_WORKSTATION = re.compile(r"RTX (A\d{4})\b", re.IGNORECASE)
_TRADE_MARK = re.compile(r"\((?:R|TM)\)", re.IGNORECASE)
# What every processor is, and how many cores all of a model have; of `2 x CPU` nothing else would be left.
_PROCESSOR = re.compile(r"(?<=\w )(?<! x )(?:\w+-Core )?(?:Processor|CPU)\b ?", re.IGNORECASE)
# The clock of a model that has a number. A virtual machine's processor may have none, and nothing else to tell it by.
_CLOCK = re.compile(r"(\d\w?) @ [\d.]+GHz")


def short_device_name(name: str) -> str:
    """The name without what all of its kind have: `RTX 4090`, `A6000`, `V100-SXM2-16GB`, `Intel Xeon Platinum 8481C`.

    As it is where nothing would be left.
    """
    told = _CLOCK.sub(r"\1", _PROCESSOR.sub("", _TRADE_MARK.sub("", " ".join(name.split()))))
    words = [word for word in told.split() if word.casefold() not in _PASSED_OVER]
    return _AMPERE_WORKSTATION.sub(r"\1", " ".join(words or name.split()))


def device_key(name: str) -> str:
    """What two names of the same device have in common; names with different keys are different devices."""
    return short_device_name(name).casefold()
