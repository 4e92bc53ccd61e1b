"""Another wall clock for the sessions of one node: libfaketime, preloaded. The kernel has one for all nodes."""

from __future__ import annotations

from pathlib import Path

from multinode.errors import UsageError
from multinode.lab.faults.kinds import Clock
from multinode.lab.faults.scene import Scene, run_in_node
from multinode.lab.spec import Lab

__all__ = ["check_clock", "clock_variables", "install_library"]

_LIBRARY = "faketime/libfaketimeMT.so.1"
_PLACES = ("/usr/lib", "/usr/local/lib", "/usr/lib64")

# On the node. It stays until the lab is down: sessions that have begun may start further programs with it.
_INSTALLED = "/usr/local/lib/multinode-clock.so.1"

# With the monotonic clock left alone, version 0.9.10 turns a sleep until a point of that clock into an error, and so
# does time.sleep of Python 3.11 end. Without this name in its symbol table the C library's own function is called; the
# name is changed at its beginning, for other names may share its end.
_INSTALL = """\
import os, sys
with open(sys.argv[1], "rb") as file:
    library = file.read().replace(b"\\0clock_nanosleep\\0", b"\\0Clock_nanosleep\\0", 1)
os.makedirs(os.path.dirname(sys.argv[2]), exist_ok=True)
with open(sys.argv[2] + ".new", "wb") as file:
    file.write(library)
os.rename(sys.argv[2] + ".new", sys.argv[2])
"""


def check_clock(lab: Lab, fault: Clock) -> None:
    """See that the library is installed."""
    del lab, fault
    _find_library()


def install_library(scene: Scene) -> None:
    """Put a library on the node's disk that changes the wall clock and nothing else."""
    run_in_node(scene.node, [scene.lab.spec.python, "-I", "-S", "-c", _INSTALL, _find_library(), _INSTALLED])


def clock_variables(fault: Clock) -> dict[str, str]:
    """What a session's environment has to hold."""
    return {
        "LD_PRELOAD": _INSTALLED,
        "FAKETIME": f"{fault.offset_s:+g}",
        # Time spans are right on a node whose clock is wrong.
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        # Times of files would move too, and Python would compile every module anew.
        "NO_FAKE_STAT": "1",
    }


def _find_library() -> str:
    for place in _PLACES:
        for found in sorted([*Path(place).glob(_LIBRARY), *Path(place).glob(f"*/{_LIBRARY}")]):
            return str(found)
    raise UsageError(
        "libfaketime is not installed, and the kernel has one clock for all nodes", hint="apt-get install libfaketime"
    )
