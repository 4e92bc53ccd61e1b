"""The screen of `nccl-test --tune`: whether anything beats NCCL's default, and how to keep it."""

from __future__ import annotations

from collections.abc import Iterator

from multinode.network.nccl_tuning import AXES, TunedSetting, TuneReport
from multinode.render.sheet import UNKNOWN, Column, Sheet, plus_minus, range_of_times, span_of_times, times
from multinode.render.table import Part, footer, labelled, paragraph, sheet_table
from multinode.stats.estimate import Estimate
from multinode.units import format_count, format_list, format_rate

_GLOO = "Nothing to tune: gloo uses one connection between two workers and one algorithm per collective."
_Rows = Iterator[tuple[str, str]]


def tune_parts(report: TuneReport, *, details: bool = False) -> Iterator[Part]:
    """The screen; `details` adds every setting, and reasons of failures."""
    yield paragraph(_verdict(report), style="bold")
    if report.settings:
        yield ""
        yield sheet_table(_sheet(report, details=details))
    if rows := [*_keep(report), *_failed(report, details=details), *_mtu(report)]:
        yield ""
        yield labelled(rows)
    if report.settings and not details:
        yield footer("Details", f"multinode show {report.run_id} --details")


def tune_warnings(report: TuneReport) -> list[str]:
    """Warnings before keeping the winner."""
    said = []
    chosen = [name for name in ("NCCL_ALGO", "NCCL_PROTO") if name in report.winner]
    if chosen:
        measured = ", ".join(dict.fromkeys(message.collective for message in report.test.messages))
        verb = "apply" if len(chosen) > 1 else "applies"
        said.append(
            f"{' and '.join(chosen)} {verb} to every collective and message size of a training, not only to the "
            f"{measured} measured here: for other messages NCCL's own choice may be faster"
        )
    if ":" in report.winner.get("NCCL_ALGO", ""):
        said.append("with a name before its colon, NCCL_ALGO applies to every size of that collective only")
    return said


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
            f"{range_of_times(together.gain)}); keep the default."
        )
    return (
        f"{together.text} is {times(together.gain.value)} faster than NCCL's default "
        f"({range_of_times(together.gain)}), measured again in {format_count(together.gain.repeats, 'round')}."
    )


def _sheet(report: TuneReport, *, details: bool) -> Sheet:
    tried = report.settings if details else _best_by_axis(report)
    together = [report.together] if report.together is not None and len(report.together.env) > 1 else []
    default = [("NCCL's default", _ms(report.default_us), "1", "")] if report.default_us is not None else []
    reasons = details and any(one.reason for one in tried)
    rows = [*default, *((one.text, _ms(one.time_us), _speedup(one), one.reason) for one in (*tried, *together))]
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
    )


def _best_by_axis(report: TuneReport) -> list[TunedSetting]:
    def gain(one: TunedSetting) -> float:
        return one.gain.value if one.gain is not None else 0.0

    by_axis = ([one for one in report.settings if one.axis == axis] for axis in AXES)
    return [max(several, key=gain) for several in by_axis if several]


def _ms(time_us: Estimate | None) -> str:
    if time_us is None:
        return UNKNOWN
    return plus_minus(Estimate(value=time_us.value / 1000, low=time_us.low / 1000, high=time_us.high / 1000))


def _speedup(one: TunedSetting) -> str:
    return UNKNOWN if one.gain is None else span_of_times(one.gain.value, (one.gain.low, one.gain.high))


def _keep(report: TuneReport) -> _Rows:
    if report.winner:
        yield "Keep", f"add to every line of the hostfile, or use --write: {env_keys(report)}"
        yield from (("Note", text) for text in tune_warnings(report))


def _failed(report: TuneReport, *, details: bool) -> _Rows:
    failed = [one.text for one in report.settings if one.reason]
    if failed and not details:
        yield "Failed", f"{format_list(failed, 4)} could not be measured"


def _mtu(report: TuneReport) -> _Rows:
    if report.jumbo_gain is not None and report.link_gbit_per_s is not None:
        more = f"{report.jumbo_gain - 1:.1%} more payload for less CPU"
        carried = f"at {format_rate(report.link_gbit_per_s)}, frames of 9000 bytes carry {more}"
        tried = (
            "not tried, because every NIC and switch on the path must support them: sudo ip link set dev IFNAME mtu "
            "9000"
        )
        yield "MTU", f"now {report.mtu}: {carried}; {tried}"
