"""The screen of `nccl-test --tune`: the settings, their gains, the ones to keep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from multinode.figures.frame import Frame
from multinode.network.nccl_tuning import (
    ALL_MESSAGES,
    AXES,
    GAIN,
    NOT_MEASURED,
    SETTING,
    TuneReport,
    default_row,
    gain_of,
    setting_row,
)
from multinode.render.sheet import Block, Chart, Charts, Labels, NextCommand, Prose, Sheet, Tiles
from multinode.stats.unknown import Unknown
from multinode.units import format_count, format_list, format_rate, times

_GLOO = "Nothing to tune: gloo uses one connection between two workers and one algorithm per collective."


def show(report: TuneReport) -> Iterator[Block]:
    """The verdict, the settings and what to keep; in detail every setting, and reasons of failures."""
    yield Prose(_verdict(report), "lead")
    if report.together is not None and not isinstance(report.together.gain, Unknown):
        best = GAIN.as_form("times").text(report.together.gain)
        yield Tiles(((f"{GAIN.title} of the best settings together", best),))
    yield Charts(lambda: _charts(report))
    if report.settings:
        yield _sheet(report, detail="brief")
        yield _sheet(report, detail="full")
    yield Labels(tuple(_keep(report)))
    failed = [setting.text for setting in report.settings if setting.failure]
    if failed:
        yield Labels((("Failed", f"{format_list(failed, 4)} could not be measured"),), detail="brief")
    yield Labels(tuple(_jumbo(report)))
    if report.settings:
        yield NextCommand("Details", f"multinode show {report.run_id} --details", detail="brief")


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
            f"{' and '.join(chosen)} {verb} to every collective and message size of a training job, not only to the "
            f"{measured} measured here: for other messages NCCL's own choice may be faster"
        )
    if ":" in report.winner.get("NCCL_ALGO", ""):
        texts.append("a collective's name before the colon limits NCCL_ALGO to that collective, at every size")
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
        return (
            "Keep NCCL's default: no setting is certain to be faster (no 95% confidence interval of a speed-up lies "
            "above 1)."
        )
    if isinstance(together.gain, Unknown):
        return f"Inconclusive: the best settings together could not be measured: {together.gain.reason}."
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
    tried = report.settings if details else [max(alike, key=gain_of) for alike in by_axis if alike]
    together = [report.together] if report.together is not None and len(report.together.env) > 1 else []
    default = [default_row(report.default_us)] if report.default_us is not None else []
    reasons = details and any(setting.failure for setting in tried)
    kind = "each setting" if details else "the best setting of each kind"
    return Frame(
        title=f"{kind}: {report.repeats} repeats, interleaved with the default",
        rows=(*default, *map(setting_row, (*tried, *together))),
        figures=(SETTING, ALL_MESSAGES, GAIN, *((NOT_MEASURED,) if reasons else ())),
    ).sheet(detail=detail)


def _keep(report: TuneReport) -> Iterator[tuple[str, str]]:
    if report.winner:
        yield "Keep", f"add to every line of the hostfile, or use --write: {env_keys(report)}"
        yield from (("Note", text) for text in tune_warnings(report))


def _jumbo(report: TuneReport) -> Iterator[tuple[str, str]]:
    if report.jumbo_gain is not None and report.link_gbit_per_s is not None:
        more = f"{report.jumbo_gain - 1:.1%} more payload and need less CPU time"
        carried = f"At {format_rate(report.link_gbit_per_s)}, frames of 9000 bytes carry {more}"
        tried = "Not tried, because every NIC and switch on the path must support them. To try them"
        yield "MTU", f"now {report.mtu}. {carried}. {tried}: sudo ip link set dev IFNAME mtu 9000"
