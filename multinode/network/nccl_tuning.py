"""NCCL settings within the limits of its documentation, their gains, the ones to keep, and the screen. Pure.

Sources: NCCL's user guide, "Environment Variables" (2.30), and src/transport/net_socket.cc. The MTU is not changed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from multinode.network.size_scan import ScanReport
from multinode.records.benchmark import CollectiveTest
from multinode.render.sheet import Block, Chart, Charts, Column, Command, Labels, Prose, Sheet, Tiles
from multinode.stats.estimate import Estimate, of_repeats, ratio, text_of
from multinode.units import MIB, format_count, format_list, format_rate, goodput_gb_per_s, times

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
_JUMBO_MTU = 9000


class TunedSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A setting compared with NCCL's default."""

    axis: str  # of AXES, or `together`
    env: dict[str, str]  # the variables
    time_us: Estimate | None = None  # of all messages in sequence; None if it could not be measured
    gain: Estimate | None = None  # its speed over the default's, round by round: 1.2 is 20% faster
    reason: str = ""  # why it could not be measured

    @property
    def text(self) -> str:
        """In shell syntax."""
        return " ".join(f"{name}={value}" for name, value in self.env.items())

    @property
    def is_faster(self) -> bool:
        """Whether its gain's 95% confidence interval is above 1."""
        return self.gain is not None and self.gain.low > 1


class TuneReport(msgspec.Struct, frozen=True, kw_only=True):
    """The document of `nccl-test --tune`; `tune.json` of the run."""

    schema: str = "multinode.tune/2"
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
    mtu: int | None = None  # of the slowest NIC, in bytes; likewise `link_gbit_per_s`, `ifname`
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
        if setting.is_faster and _gain(setting) > _gain(best.get(setting.axis)):
            best[setting.axis] = setting
    return {name: value for setting in best.values() for name, value in setting.env.items()}


def with_mtu(report: TuneReport, scan: ScanReport) -> TuneReport:
    """Add the gain of larger frames to a report, from the size of their headers."""
    gain = None
    if scan.mtu is not None and scan.link_gbit_per_s is not None and scan.mtu < _JUMBO_MTU:
        carried = goodput_gb_per_s(scan.link_gbit_per_s, scan.mtu)
        gain = goodput_gb_per_s(scan.link_gbit_per_s, _JUMBO_MTU) / carried
    return msgspec.structs.replace(report, mtu=scan.mtu, link_gbit_per_s=scan.link_gbit_per_s, jumbo_gain=gain)


def _gain(setting: TunedSetting | None) -> float:
    return setting.gain.value if setting is not None and setting.gain is not None else 0.0


def _is_since(version: str | None, since: tuple[int, int]) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    # An unknown version is assumed to be recent.
    return numbers is None or (int(numbers[1]), int(numbers[2])) >= since


_GLOO = "Nothing to tune: gloo uses one connection between two workers and one algorithm per collective."


def show(report: TuneReport) -> Iterator[Block]:
    """The verdict, the settings and what to keep; in detail every setting, and reasons of failures."""
    yield Prose(_verdict(report), "lead")
    if report.together is not None and report.together.gain is not None:
        yield Tiles((("speed-up of the best settings together", times(report.together.gain.value)),))
    yield Charts(lambda: _charts(report))
    if report.settings:
        yield _sheet(report, detail="brief")
        yield _sheet(report, detail="full")
    yield Labels(tuple(_keep(report)))
    failed = [setting.text for setting in report.settings if setting.reason]
    if failed:
        yield Labels((("Failed", f"{format_list(failed, 4)} could not be measured"),), detail="brief")
    yield Labels(tuple(_jumbo(report)))
    if report.settings:
        yield Command("Details", f"multinode show {report.run_id} --details", detail="brief")


def _charts(report: TuneReport) -> Iterable[Chart]:
    from multinode.network.charts import tune_charts  # noqa: PLC0415 - plotly is an extra

    return tune_charts(report)


def tune_warnings(report: TuneReport) -> list[str]:
    """Warnings before keeping the winner."""
    texts = []
    chosen = [name for name in ("NCCL_ALGO", "NCCL_PROTO") if name in report.winner]
    if chosen:
        measured = ", ".join(dict.fromkeys(message.collective for message in report.test.messages))
        verb = "apply" if len(chosen) > 1 else "applies"
        texts.append(
            f"{' and '.join(chosen)} {verb} to every collective and message size of a training, not only to the "
            f"{measured} measured here: for other messages NCCL's own choice may be faster"
        )
    if ":" in report.winner.get("NCCL_ALGO", ""):
        texts.append("with a name before its colon, NCCL_ALGO applies to every size of that collective only")
    return texts


def env_keys(report: TuneReport) -> str:
    """The winner as keys of a hostfile."""
    return " ".join(f"env.{name}={value}" for name, value in report.winner.items())


def _verdict(report: TuneReport) -> str:
    if report.backend == "gloo":
        return _GLOO
    if report.backend != "nccl":
        return f"Nothing to tune: these are NCCL settings, but the backend of these nodes is {report.backend}."
    together = report.together
    if together is None:
        return "Keep NCCL's default: no setting is faster (the 95% confidence interval of each speed-up reaches 1)."
    if together.gain is None:
        return f"Inconclusive: the best settings together could not be measured: {together.reason}."
    if not together.is_faster:
        return (
            f"Inconclusive: {together.text}, measured again, is within noise of NCCL's default (speed-up "
            f"{together.gain.text('times_range')}); keep the default."
        )
    return (
        f"{together.text} is {times(together.gain.value)} faster than NCCL's default "
        f"({together.gain.text('times_range')}), measured again in {format_count(together.gain.repeats, 'round')}."
    )


def _sheet(report: TuneReport, detail: Literal["brief", "full"]) -> Sheet:
    details = detail == "full"
    by_axis = ([setting for setting in report.settings if setting.axis == axis] for axis in AXES)
    tried = report.settings if details else [max(alike, key=_gain) for alike in by_axis if alike]
    together = [report.together] if report.together is not None and len(report.together.env) > 1 else []
    default = [("NCCL's default", _ms(report.default_us), "1", "")] if report.default_us is not None else []
    reasons = details and any(setting.reason for setting in tried)
    rows = [
        *default,
        *(
            (
                setting.text,
                _ms(setting.time_us),
                text_of(setting.gain, "times"),
                setting.reason,
            )
            for setting in (*tried, *together)
        ),
    ]
    columns = (
        Column("setting", words=True),
        Column("all messages", "ms"),
        Column("speed-up", "95%"),
        *((Column("not measured", words=True),) if reasons else ()),
    )
    kind = "each setting" if details else "the best setting of each kind"
    return Sheet(
        title=f"{kind}: {report.repeats} repeats, interleaved with the default",
        columns=columns,
        rows=tuple(row[: len(columns)] for row in rows),
        detail=detail,
    )


def _ms(time_us: Estimate | None) -> str:
    return text_of(time_us * 1e-3 if time_us is not None else None)


def _keep(report: TuneReport) -> Iterator[tuple[str, str]]:
    if report.winner:
        yield "Keep", f"add to every line of the hostfile, or use --write: {env_keys(report)}"
        yield from (("Note", text) for text in tune_warnings(report))


def _jumbo(report: TuneReport) -> Iterator[tuple[str, str]]:
    if report.jumbo_gain is not None and report.link_gbit_per_s is not None:
        more = f"{report.jumbo_gain - 1:.1%} more payload for less CPU"
        carried = f"at {format_rate(report.link_gbit_per_s)}, frames of 9000 bytes carry {more}"
        tried = "not tried, because every NIC and switch on the path must support them"
        yield "MTU", f"now {report.mtu}: {carried}; {tried}: sudo ip link set dev IFNAME mtu 9000"
