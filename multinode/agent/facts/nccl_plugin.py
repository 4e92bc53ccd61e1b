"""Where NCCL's Inspector plugin lies on this node, if it does: NVIDIA ships its source; a build has no fixed place."""

from __future__ import annotations

import glob
import os
from typing import Iterator, Mapping, Optional

_NAMES = ("libnccl-profiler-inspector.so", "librccl-profiler-inspector.so")
_FOLDERS = (
    "/usr/lib",
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/local/lib",
    "/usr/local/nccl/lib",
    "/opt/nccl/lib",
    "/opt/rocm/lib",
)


def find_inspector(env: Mapping[str, str], python: Optional[str], folders: tuple[str, ...] = _FOLDERS) -> Optional[str]:
    """Its path: by NCCL_PROFILER_PLUGIN, along LD_LIBRARY_PATH, beside torch's NCCL, or where libraries lie."""
    named = env.get("NCCL_PROFILER_PLUGIN", "")
    if "inspector" in os.path.basename(named) and os.path.isfile(named):
        return os.path.abspath(named)
    places = [
        *filter(None, env.get("LD_LIBRARY_PATH", "").split(os.pathsep)),
        *_beside_torch(python),
        *folders,
    ]
    paths = (os.path.join(folder, name) for folder in places for name in _NAMES)
    return next((os.path.abspath(path) for path in paths if os.path.isfile(path)), None)


def _beside_torch(python: Optional[str]) -> Iterator[str]:
    if python is not None:
        environment = glob.escape(os.path.dirname(os.path.dirname(python)))
        yield from sorted(glob.glob(f"{environment}/lib/python3*/site-packages/nvidia/nccl/lib"))
