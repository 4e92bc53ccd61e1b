"""This machine's GPUs as lab nodes share them: device files, and driver files that a container runtime has mounted.

An overlay shows what such a file was mounted over, so each of them is mounted on the node once more.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from multinode.errors import UsageError

_DEVICES = ("dev/nvidia*", "dev/nvidia-caps/*")
# What NVIDIA's container runtime mounts: nvidia-smi, libcuda.so, libnvcuvid.so, libEGL_nvidia.so, firmware.
_DRIVER = re.compile(r"nvidia|/lib(?:cuda|nv)[^/]*\.so")
# A node has its own of these.
_OWN = ("/proc/", "/sys/")
_QUERY = ("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
# Without its persistence daemon the driver is loaded anew for each call.
_QUERY_S = 60.0

GPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "DISABLE_VERSION_CHECK": "1",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "2",
}
"""Nodes that share a GPU have its network alone between them, whatever else the machine has, and few channels."""


def count_gpus(query: Sequence[str] = _QUERY) -> int:
    """How many GPUs nvidia-smi lists here.

    Raises:
        UsageError: it lists none, or does not answer.
    """
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_QUERY_S, check=False, errors="replace")
    except FileNotFoundError:
        said = f"{query[0]} was not found"
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    else:
        count = sum(line.startswith("GPU-") for line in done.stdout.splitlines())
        if done.returncode == 0 and count:
            return count
        said = next(filter(None, map(str.strip, (done.stdout + done.stderr).splitlines())), "it lists none")[:200]
    raise UsageError(
        f"no NVIDIA GPU answers on this machine ({said})",
        hint="see why: nvidia-smi",
    )


def gpu_files(root: Path, mounts: str, is_device: Callable[[Path], bool] = Path.is_char_device) -> tuple[str, ...]:
    """Paths that a node needs to see as they are here.

    Args:
        root: `/`, below which the devices are looked for.
        mounts: the text of /proc/self/mounts.
        is_device: whether a path is a character device.

    Raises:
        UsageError: the driver has no device files here.
    """
    found = [path for pattern in _DEVICES for path in root.glob(pattern) if is_device(path)]
    devices = sorted(f"/{path.relative_to(root)}" for path in found)
    if not devices:
        raise UsageError(
            "there are no device files /dev/nvidia* on this machine",
            hint="sudo modprobe nvidia-uvm; in a container: start it with --gpus all",
        )
    places = [line.split()[1] for line in mounts.splitlines()]
    driver = (place for place in places if _DRIVER.search(place) and not place.startswith(_OWN))
    # A directory is a disk of its own, which nodes have as an overlay.
    files = [place for place in driver if not (root / place.lstrip("/")).is_dir()]
    return tuple(dict.fromkeys([*devices, *files]))
