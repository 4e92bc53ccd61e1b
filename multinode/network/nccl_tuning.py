"""NCCL settings within the limits of its documentation, their gains, and the ones to keep. Pure.

Sources: NCCL's user guide, "Environment Variables" (2.30), and src/transport/net_socket.cc. The MTU is not changed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import msgspec

from multinode.figures.figure import Figure, Row
from multinode.network.size_scan import ScanReport
from multinode.records.benchmark import CollectiveTest
from multinode.stats.estimate import Estimate, exactly, of_repeats, ratio
from multinode.stats.unknown import UNMEASURED, Unknown, found, known, or_none, reason_of
from multinode.units import MIB, goodput_gb_per_s

AXES = {
    "sockets": ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"),
    "algorithm": ("NCCL_ALGO",),
    "protocol": ("NCCL_PROTO",),
    "buffer": ("NCCL_BUFFSIZE",),
}
"""Variables that are tried together, by what they affect."""
# Threads per connection, 1 to 16, and sockets per thread; their product is at most 64, and 1 by default.
_SOCKETS = ((1, 4), (2, 2), (2, 8), (4, 4), (8, 4), (8, 8))
# LL128 is never set: on platforms without support it corrupts data.
_PROTOCOLS = ("Simple", "LL")
# Powers of two around the default of 4 MiB.
_BUFFER_BYTES = (1 * MIB, 8 * MIB, 16 * MIB)
# Since this version a collective without the algorithm fails, and algorithms can be set per collective.
_PER_COLLECTIVE_SINCE = (2, 24)
JUMBO_MTU = 9000


class TunedSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A setting compared with NCCL's default."""

    axis: str  # of AXES, or `together`
    env: dict[str, str]  # the variables
    time_us: Estimate | Unknown = UNMEASURED  # of all messages in sequence
    gain: Estimate | Unknown = UNMEASURED  # its speed over the default's, round by round: 1.2 is 20% faster

    @property
    def text(self) -> str:
        """In shell syntax."""
        return " ".join(f"{name}={value}" for name, value in self.env.items())

    @property
    def is_faster(self) -> bool:
        """Whether its gain's 95% confidence interval is above 1."""
        return not isinstance(self.gain, Unknown) and self.gain.low > 1

    @property
    def failure(self) -> str:
        """Why it could not be measured; empty if it was, or has not been tried."""
        return "" if self.gain == UNMEASURED else reason_of(self.gain)


def _gain(row: Row) -> str:
    # The default's is 1 by definition.
    return "1" if row.item is None else GAIN.text(row[GAIN])


SETTING = Figure[str]("setting", "setting", about="NCCL environment variables that were set")
ALL_MESSAGES = Figure[Estimate](
    "all_messages_ms", "all messages", "ms", form="interval", about="total time of all messages, one after another"
)
GAIN = Figure[Estimate](
    "nccl_gain",
    "speed-up",
    "95%",
    form="times_interval",
    about="speed relative to NCCL's defaults, from interleaved measurements",
    cell=_gain,
)
NOT_MEASURED = Figure[str]("reason", "not measured", about="why a setting could not be measured")


def setting_row(setting: TunedSetting) -> Row:
    """The figures of a setting."""
    return _row(setting, setting.text, setting.time_us, setting.gain, setting.failure)


def default_row(default_us: Estimate) -> Row:
    """The figures of NCCL's default, which the others are compared with."""
    return _row(None, "NCCL's default", default_us, exactly(1.0), "")


def _row(
    setting: TunedSetting | None, name: str, time_us: Estimate | Unknown, gain: Estimate | Unknown, failure: str
) -> Row:
    time_ms = found(lambda: known(time_us) * 1e-3)
    values = {SETTING: name, ALL_MESSAGES: time_ms, GAIN: gain, NOT_MEASURED: failure}
    return Row(setting, {figure.name: value for figure, value in values.items()})


class TuneReport(msgspec.Struct, frozen=True, kw_only=True):
    """The document that `nccl-test --tune --json` prints. It is stored as `tune.json` in the directory of the run."""

    schema: str = "multinode.tune/3"
    run_id: str
    backend: str  # `nccl`; with `gloo` nothing is measured
    nodes: tuple[str, ...]
    world_size: int = 0
    nccl_version: str | None = None
    repeats: int = 0
    test: CollectiveTest  # the messages
    default_us: Estimate | None = None  # their time with the default, in sequence; None if nothing was measured
    settings: tuple[TunedSetting, ...] = ()  # each measured alone, interleaved with the default
    # the best of each axis combined, measured again with the default, to avoid selection bias; None if none is faster
    together: TunedSetting | None = None
    mtu: int | None = None  # of the slowest NIC, in bytes; also `link_gbit_per_s`, `ifname`
    link_gbit_per_s: float | None = None
    jumbo_gain: float | None = None  # TCP gain of an MTU of 9000; None if it is already set, or the rate is unknown
    directory: str = ""

    @property
    def winner(self) -> dict[str, str]:
        """The variables to keep; empty if nothing is certainly faster."""
        return self.together.env if self.together is not None and self.together.is_faster else {}


def candidates(nccl_version: str | None, *, over_sockets: bool) -> tuple[TunedSetting, ...]:
    """The settings to try, axis by axis."""
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
    """Time of the messages of a scan in sequence; for a training, each as often as it is sent.

    Raises ValueError if values were wrong, or a time could not be measured.
    """
    wrong = sum(row.num_wrong or 0 for row in report.rows)
    if wrong:
        raise ValueError(f"{wrong} values are wrong")
    total_us = report.like.step_us if report.like is not None else math.fsum(row.time_us.value for row in report.rows)
    if not total_us or not math.isfinite(total_us):
        raise ValueError("some messages were not measured")
    return total_us


def tuned(setting: TunedSetting, default_us: Sequence[float], setting_us: Sequence[float]) -> TunedSetting:
    """The setting with its gain, from two rounds on; both were measured in each."""
    default, own = of_repeats(default_us), of_repeats(setting_us)
    return msgspec.structs.replace(setting, time_us=own, gain=ratio(default, own))


def choose(settings: Sequence[TunedSetting]) -> dict[str, str]:
    """The variables of the best faster setting of each axis."""
    best: dict[str, TunedSetting] = {}
    for setting in settings:
        if setting.is_faster and gain_of(setting) > gain_of(best.get(setting.axis)):
            best[setting.axis] = setting
    return {name: value for setting in best.values() for name, value in setting.env.items()}


def with_mtu(report: TuneReport, scan: ScanReport) -> TuneReport:
    """Add the gain of larger frames to a report, from the size of their headers."""
    gain = None
    if scan.mtu is not None and scan.link_gbit_per_s is not None and scan.mtu < JUMBO_MTU:
        carried = goodput_gb_per_s(scan.link_gbit_per_s, scan.mtu)
        gain = goodput_gb_per_s(scan.link_gbit_per_s, JUMBO_MTU) / carried
    return msgspec.structs.replace(report, mtu=scan.mtu, link_gbit_per_s=scan.link_gbit_per_s, jumbo_gain=gain)


def gain_of(setting: TunedSetting | None) -> float:
    """Its speed over the default's; 0 without one."""
    gain = None if setting is None else or_none(setting.gain)
    return gain.value if gain is not None else 0.0


def _is_since(version: str | None, since: tuple[int, int]) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    # An unknown version is assumed to be recent.
    return numbers is None or (int(numbers[1]), int(numbers[2])) >= since
