"""A forecast in words: `with_words` fills its text fields, once, where it is made."""

from __future__ import annotations

import shlex

import msgspec

from multinode.cluster.quoting import hosts_option
from multinode.predict.break_even import BreakEven, Needed, NodeGain
from multinode.predict.forecast import Forecast, PredictedScenario
from multinode.predict.leave_one_out import BackTest
from multinode.predict.needed_words import why_words
from multinode.predict.predict import split_of
from multinode.profile.bottleneck_words import bottleneck_words
from multinode.units import format_count, format_rate


def with_words(forecast: Forecast) -> Forecast:
    """The forecast with its sentences."""
    return msgspec.structs.replace(
        forecast,
        scenarios=tuple(map(scenario_with_words, forecast.scenarios)),
        break_even=_break_even(forecast.break_even) if forecast.break_even is not None else None,
        back_test=back_test_with_words(forecast.back_test),
    )


def scenario_with_words(one: PredictedScenario) -> PredictedScenario:
    """A scenario with the sentence of its bottleneck."""
    sentence = bottleneck_words(one.bottleneck, split_of(one.parts))
    return msgspec.structs.replace(one, bottleneck=msgspec.structs.replace(one.bottleneck, sentence=sentence))


def back_test_with_words(tested: BackTest) -> BackTest:
    """A back-test with its sentence."""
    return msgspec.structs.replace(tested, sentence=error_words(tested))


def launch_command(job: str, hosts: str, options: str) -> str:
    """The launch of the YAML that was measured, on the nodes that were; of a script, an empty `job`, options alone."""
    return f"multinode launch{hosts_option(hosts)} {shlex.quote(job)} {options}".rstrip() if job else options


def error_words(tested: BackTest) -> str:
    """How far off the model was where that is known, and what says nothing of other places."""
    if tested.median_error is None or tested.worst is None:
        return "not checked: no measured run to compare with"
    runs, worst = format_count(len(tested.tested), "measured run"), f"{abs(tested.worst.error):.1%}"
    off = worst if len(tested.tested) == 1 else f"{tested.median_error:.1%} (median), {worst} at worst"
    only = "; at other links only the ranges say how sure it is" if len(_links(tested)) == 1 else ""
    return f"checked against {runs}{_where(tested)}: step time off by {off}{only}"


def short_error_words(tested: BackTest) -> str:
    """The same in a few words, to stand behind a figure."""
    if tested.worst is None:
        return "not checked against a measured run"
    only = "only " if len(_links(tested)) == 1 else ""
    runs = format_count(len(tested.tested), "run")
    return f"checked {only}against {runs}{_where(tested)}: off by {abs(tested.worst.error):.1%} at worst"


def _links(tested: BackTest) -> list[float]:
    """Of all trials, slowest first; empty where an earlier release did not store them."""
    links = [one.link_gbit_per_s for one in tested.tested]
    return sorted({one for one in links if one is not None}) if None not in links else []


def _where(tested: BackTest) -> str:
    """` on 2 nodes at 100 Mbit/s`; empty where it is not known."""
    links, nodes = _links(tested), sorted({one.nodes for one in tested.tested if one.nodes is not None})
    if not links or not nodes:
        return ""
    count = format_count(nodes[0], "node") if len(nodes) == 1 else f"{nodes[0]} to {nodes[-1]} nodes"
    rates = " to ".join(dict.fromkeys(map(format_rate, (links[0], links[-1]))))
    return f" on {count} at {rates}"


def _break_even(found: BreakEven) -> BreakEven:
    needed = {name: one for name in found.__struct_fields__ if isinstance(one := getattr(found, name), Needed)}
    told = {name: msgspec.structs.replace(one, why=why_words(one)) for name, one in needed.items()}
    next_node = msgspec.structs.replace(found.next_node, sentence=_next_node(found.next_node))
    return msgspec.structs.replace(found, **told, next_node=next_node)


def _next_node(found: NodeGain) -> str:
    """Whether to add it."""
    low, high = found.worth_range or (found.worth, found.worth)
    told = f"{low:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"
    if high <= 0:
        return f"do not add it: {found.nodes} nodes are no faster than {found.nodes - 1}"
    return f"{'it adds' if low > 0 else 'inconclusive:'} {told} of what one such node gives alone"
