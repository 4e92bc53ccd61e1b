"""A forecast in words: `with_words` fills its text fields, once, where it is made."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable

import msgspec

from multinode.cluster.quoting import hosts_option
from multinode.predict.break_even import SLOWEST_GBIT_PER_S, BreakEven, Needed, NodeGain
from multinode.predict.forecast import Forecast
from multinode.predict.leave_one_out import BackTest
from multinode.units import format_count, format_rate

# A narrower range is one figure.
_ONE_FIGURE = 1.05
# Rounding must not decide.
_ROUNDING = 1e-9
_REASONS = {
    "": "",
    "from": "from this link on",
    "any": "at any bandwidth",
    "same_workers": "never, at any bandwidth: one node has as many workers, and no network between them",
    "slow_nodes": "never, at any bandwidth: the nodes' own work, and waiting for each other, is too slow",
    "overhead": "never, at any bandwidth: the overhead of every message, or what the nodes get through, remains",
    "overlap_off": "never: no communication is hidden, as overlap is off",
    "hid_nothing": "never: no communication is hidden, as the measured run hid none",
    "sent_at_once": "never: no communication is hidden, as all of it is sent after the last gradient is there",
    "uncut": "unknown: how much of it hides depends on the buckets that gradients are sent in, which are not known "
    "(--bucket-mib 25 is torch's default); the prediction hides nothing, and the end of its range all that it could",
    "as_now": "as it is now",
    "no_accumulation": "no accumulation is enough",
}


def why_words(needed: Needed) -> str:
    """Its reason; of what an earlier release stored, as it was told then."""
    if needed.reason == "global_batch" and needed.ratio is not None:
        verb = "becomes" if needed.ratio > 1 else "could be"
        return f"the global batch {verb} {needed.ratio:.3g} times as large"
    if needed.reason == "micro_batches" and needed.ratio is not None:
        left = f"no accumulation leaves less than {needed.ratio:.0%} of the bytes of a sample"
        return f"{needed.strategy} communicates in every micro-batch: {left}"
    return _REASONS.get(needed.reason, "") or needed.why


def link_words(needed: Needed) -> str:
    """A break-even link: `between 800 Mbit/s and 1.2 Gbit/s`, `at least 2 Gbit/s`."""
    return _needed_words(needed, "link", _rate)


def break_even_words(found: BreakEven, nodes: int, link_gbit_per_s: float | None = None) -> str:
    """Which nodes overtake which one, at what link, and what the link is: of the layout that can win."""
    # One node against itself, spread over several, cannot win.
    needed, workers = found.full_beats_one or found.beats_one, format_count(found.one_node_workers, "worker")
    each = f" with {workers} each" if found.full_beats_one is not None else ""
    sides, words = (f"{format_count(nodes, 'node')}{each}", f"1 node with {workers}"), link_words(needed)
    yours = f"; yours is {format_rate(link_gbit_per_s)}" if link_gbit_per_s is not None else ""
    if not words.startswith(("between", "about", "at most", "at least", "from")):
        return f"{sides[0]} against {sides[1]}: {words}"
    of = "" if words.startswith(("between", "from")) else "of "
    return f"{sides[0]} overtake {sides[1]} at a link {of}{words}{yours}"


def accumulation_words(needed: Needed) -> str:
    """Micro-batches per step, and what they make of the global batch."""
    if needed.value is None:
        return why_words(needed) if needed.low is None else _count(needed)
    # An earlier release stored no range.
    if needed.low is None:
        return f"{needed.value:g}; {why_words(needed)}"
    return f"{_count(needed)}; at {needed.value:g} {why_words(needed)}"


def _count(needed: Needed) -> str:
    return _needed_words(needed, "accumulation", lambda count, _: f"{count:g}")


def _needed_words(needed: Needed, noun: str, told: Callable[[float, int], str]) -> str:
    """What is needed of a noun; `told` writes an amount with its unit, -1 rounds it down, 1 up."""
    if needed.low is None:
        # An earlier release stored no range.
        return why_words(needed) if needed.value is None or needed.always else f"from {told(needed.value, 0)} on"
    is_any, low = needed.low <= SLOWEST_GBIT_PER_S, told(needed.low, -1)
    if needed.high is None and is_any:
        return f"inconclusive: any {noun} may be enough, or none"
    if needed.high is None:
        is_apart = needed.value is not None and needed.value > _ONE_FIGURE * needed.low
        likely = f"about {told(needed.value or 0, 0)}, " if is_apart else ""
        return f"{likely}at least {low}; within the error of the prediction, possibly no {noun} is enough"
    if is_any:
        return why_words(needed) if needed.high <= SLOWEST_GBIT_PER_S else f"at most {told(needed.high, 1)}"
    if needed.high / needed.low <= _ONE_FIGURE:
        return f"about {told(needed.value or needed.high, 0)}"
    return f"between {low} and {told(needed.high, 1)}"


def _rate(gbit_per_s: float, way: int) -> str:
    """Of a range two digits, outwards."""
    if not way:
        return format_rate(gbit_per_s)
    unit = 10.0 ** (math.floor(math.log10(gbit_per_s)) - 1)
    digits = gbit_per_s / unit
    return format_rate((math.ceil(digits - _ROUNDING) if way > 0 else math.floor(digits + _ROUNDING)) * unit)


def with_words(forecast: Forecast) -> Forecast:
    """The forecast with its sentences."""
    return msgspec.structs.replace(
        forecast,
        break_even=_break_even(forecast.break_even) if forecast.break_even is not None else None,
        back_test=back_test_with_words(forecast.back_test),
    )


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
