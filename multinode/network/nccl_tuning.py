"""NCCL's settings, within the limits of its documentation; what each of them gains, and which to keep. Pure.

Sources: NCCL's user guide, "Environment Variables" (2.30), and src/transport/net_socket.cc. The MTU is left as it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import msgspec

from multinode.network.size_scan import ScanReport
from multinode.records.benchmark import CollectiveTest
from multinode.stats.estimate import Estimate, of_repeats, ratio
from multinode.units import goodput_gb_per_s

AXES = {
    "sockets": ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"),
    "algorithm": ("NCCL_ALGO",),
    "protocol": ("NCCL_PROTO",),
    "buffer": ("NCCL_BUFFSIZE",),
}
"""Variables that are tried together, by what they decide."""
# Helper threads of a connection, 1 to 16, and sockets of each thread; their product is 64 at most, and by default 1.
_SOCKETS = ((1, 4), (2, 2), (2, 8), (4, 4), (8, 4), (8, 8))
# LL128 is never asked for: where a platform does not support it, it corrupts data.
_PROTOCOLS = ("Simple", "LL")
_MIB = 1 << 20
# Powers of two around the default of 4 MiB.
_BUFFER_BYTES = (1 * _MIB, 8 * _MIB, 16 * _MIB)
# From here on a collective that has no such algorithm fails with it, and algorithms can be named for one collective.
_PER_COLLECTIVE_SINCE = (2, 24)
_JUMBO_MTU = 9000


class TunedSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A setting beside NCCL's own choice.

    Attributes:
        axis: of AXES, or `together`.
        env: the variables.
        time_us: of all messages, one after the other; None where it could not be measured.
        gain: its speed over the default's, turn by turn: 1.2 is 20 % faster.
        reason: why it could not be measured.
    """

    axis: str
    env: dict[str, str]
    time_us: Estimate | None = None
    gain: Estimate | None = None
    reason: str = ""

    @property
    def text(self) -> str:
        """As a shell would set it."""
        return " ".join(f"{name}={value}" for name, value in self.env.items())

    @property
    def is_faster(self) -> bool:
        """Whether its gain's 95 % confidence interval lies above 1."""
        return self.gain is not None and self.gain.low > 1


class TuneReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `nccl-test --tune` prints; `tune.json` of the run.

    Attributes:
        backend: `nccl`; with `gloo` there is nothing to tune, and nothing was measured.
        test: the messages.
        default_us: what they take as it is, one after the other; None where nothing was measured.
        settings: each tried by itself, in turns with the default.
        together: the best of each axis together, measured anew in turns with the default, so that its gain is not that
            of the luckiest; None where none of them is faster.
        mtu: of the slowest NIC, in bytes; likewise `link_gbit_per_s`, `ifname`.
        jumbo_gain: how much more TCP a link carries with an MTU of 9000; None where it has that, or no rate is known.
    """

    schema: str = "multinode.tune/1"
    run_id: str
    backend: str
    nodes: tuple[str, ...]
    world_size: int = 0
    nccl_version: str | None = None
    repeats: int = 0
    test: CollectiveTest
    default_us: Estimate | None = None
    settings: tuple[TunedSetting, ...] = ()
    together: TunedSetting | None = None
    mtu: int | None = None
    link_gbit_per_s: float | None = None
    jumbo_gain: float | None = None
    directory: str = ""

    @property
    def winner(self) -> dict[str, str]:
        """The variables to keep; none where nothing is faster for certain."""
        return self.together.env if self.together is not None and self.together.is_faster else {}


def candidates(nccl_version: str | None, *, over_sockets: bool) -> tuple[TunedSetting, ...]:
    """What is tried, an axis after the other.

    Args:
        nccl_version: of the nodes, `2.27.5`; None is unknown.
        over_sockets: whether NCCL goes over sockets; else their threads decide nothing.
    """
    tree = "allreduce:tree" if _is_since(nccl_version, _PER_COLLECTIVE_SINCE) else "Tree"
    values: dict[str, Sequence[tuple[object, ...]]] = {
        "sockets": _SOCKETS if over_sockets else (),
        "algorithm": [("Ring",), (tree,)],
        "protocol": [(name,) for name in _PROTOCOLS],
        "buffer": [(size,) for size in _BUFFER_BYTES],
    }
    return tuple(
        TunedSetting(axis=axis, env={name: str(value) for name, value in zip(AXES[axis], chosen, strict=True)})
        for axis, several in values.items()
        for chosen in several
    )


def measured_us(report: ScanReport) -> float:
    """What the messages of a scan took, one after the other; of a training's as often as it sends each.

    Raises:
        ValueError: values came out wrong, or a time could not be measured.
    """
    wrong = sum(row.num_wrong or 0 for row in report.rows)
    if wrong:
        raise ValueError(f"{wrong} values came out wrong")
    total_us = report.like.step_us if report.like is not None else math.fsum(row.time_us for row in report.rows)
    if not total_us or not math.isfinite(total_us):
        raise ValueError("not all messages were measured")
    return total_us


def tuned(setting: TunedSetting, default_us: Sequence[float], setting_us: Sequence[float]) -> TunedSetting:
    """The setting with its gain, from two turns on; both were measured in each."""
    default, own = of_repeats(default_us), of_repeats(setting_us)
    return msgspec.structs.replace(setting, time_us=own, gain=ratio(default, own))


def choose(settings: Sequence[TunedSetting]) -> dict[str, str]:
    """The variables of the best setting of each axis, of those that are faster."""
    best: dict[str, TunedSetting] = {}
    for setting in settings:
        if setting.is_faster and _gain(setting) > _gain(best.get(setting.axis)):
            best[setting.axis] = setting
    return {name: value for setting in best.values() for name, value in setting.env.items()}


def with_mtu(report: TuneReport, scan: ScanReport) -> TuneReport:
    """The same with what larger frames would carry, by their headers."""
    gain = None
    if scan.mtu is not None and scan.link_gbit_per_s is not None and scan.mtu < _JUMBO_MTU:
        carried = goodput_gb_per_s(scan.link_gbit_per_s, scan.mtu)
        gain = goodput_gb_per_s(scan.link_gbit_per_s, _JUMBO_MTU) / carried
    return msgspec.structs.replace(report, mtu=scan.mtu, link_gbit_per_s=scan.link_gbit_per_s, jumbo_gain=gain)


def _gain(setting: TunedSetting | None) -> float:
    return setting.gain.value if setting is not None and setting.gain is not None else 0.0


def _is_since(version: str | None, since: tuple[int, int]) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    # An unknown one is taken for a recent one, which also knows what is written for one collective.
    return numbers is None or (int(numbers[1]), int(numbers[2])) >= since
