"""What `nccl-test --tune` says: a row a setting, the gain of the best of them together, and what to put where."""

from __future__ import annotations

from collections.abc import Iterator

from multinode.analyse.nccl_test.nccl_tuning import TuneReport
from multinode.analyse.stats.estimate import Estimate
from multinode.report.render.sheet import UNKNOWN, Column, Sheet
from multinode.units import format_rate

__all__ = ["env_keys", "tune_lines", "tune_sheet", "tune_warnings"]

_GLOO = (
    "gloo has nothing to tune: it sends over one connection between each two workers, by one algorithm for each "
    "collective, and reads no settings for either"
)


def tune_sheet(report: TuneReport) -> Sheet:
    """A row a setting, in the order in which they were tried."""
    return Sheet(
        title=f"each setting by itself, {report.repeats} repeats in turns with the default",
        columns=(
            Column("setting", words=True),
            Column("speed-up", "x"),
            Column("95 % interval"),
            Column("why not", words=True),
        ),
        rows=tuple(
            (one.text, *(_gain(one.gain) if one.gain is not None else (UNKNOWN, UNKNOWN)), one.reason)
            for one in report.settings
        ),
    )


def tune_lines(report: TuneReport) -> list[str]:
    """What is to be said below the table, the result first."""
    if report.backend == "gloo":
        return [_GLOO]
    if report.backend != "nccl":
        return [f"NCCL's settings are tuned, and these nodes speak {report.backend}"]
    return [*_result(report), *_hostfile(report), *_mtu(report)]


def tune_warnings(report: TuneReport) -> list[str]:
    """What is to be known before the winner is kept."""
    said = []
    chosen = [name for name in ("NCCL_ALGO", "NCCL_PROTO") if name in report.winner]
    if chosen:
        measured = ", ".join(dict.fromkeys(message.collective for message in report.test.messages))
        verb = "hold" if len(chosen) > 1 else "holds"
        said.append(
            f"{' and '.join(chosen)} {verb} for every collective and every message size of a training, not only for "
            f"the {measured} measured here: where its messages differ, NCCL's own choice may be faster"
        )
    if ":" in report.winner.get("NCCL_ALGO", ""):
        said.append("with a name before its colon, NCCL_ALGO holds for every size of that collective alone")
    return said


def env_keys(report: TuneReport) -> str:
    """The winner as keys of a hostfile."""
    return " ".join(f"env.{name}={value}" for name, value in report.winner.items())


def _result(report: TuneReport) -> Iterator[str]:
    if report.default_us is not None:
        low, high = report.default_us.low / 1000, report.default_us.high / 1000
        yield (
            f"as it is, all messages one after the other take {report.default_us.value / 1000:.4g} ms "
            f"({low:.4g} to {high:.4g} ms)"
        )
    together = report.together
    if together is None:
        yield "no setting is faster than NCCL's own choice: the 95 % confidence interval of each gain reaches 1"
    elif together.gain is None:
        yield f"the best settings together could not be measured: {together.reason}"
    else:
        value, interval = _gain(together.gain)
        yield (
            f"the best of each together, measured anew in {together.gain.repeats} turns: {value}x the default "
            f"({interval}): {together.text}"
        )
        if not together.is_faster:
            yield "that interval reaches 1: whether it is faster is inconclusive, and there is nothing to keep"


def _hostfile(report: TuneReport) -> Iterator[str]:
    if report.winner:
        yield from tune_warnings(report)
        yield f"to keep it, on the line of every node of the hostfile, or by --write: {env_keys(report)}"


def _mtu(report: TuneReport) -> Iterator[str]:
    if report.jumbo_gain is not None and report.link_gbit_per_s is not None:
        yield (
            f"MTU {report.mtu}: at {format_rate(report.link_gbit_per_s)} frames of 9000 bytes carry "
            f"{report.jumbo_gain - 1:.1%} more payload, and cost the processors less; not tried, as every NIC and "
            "switch in between has to take them: sudo ip link set dev IFNAME mtu 9000"
        )


def _gain(gain: Estimate) -> tuple[str, str]:
    return f"{gain.value:.3f}", f"{gain.low:.3f} to {gain.high:.3f}"
