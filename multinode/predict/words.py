"""What is needed to break even, in words, and the command that launches what was measured."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable

from multinode.cluster.quoting import hosts_option
from multinode.predict.break_even import SLOWEST_GBIT_PER_S, BreakEven, Needed
from multinode.units import format_count, format_range, format_rate

# A narrower range is one figure.
_ONE_FIGURE = 1.05
# Rounding must not decide.
_ROUNDING = 1e-9


def link_words(needed: Needed) -> str:
    """A break-even link: `between 800 Mbit/s and 1.2 Gbit/s`, `at least 2 Gbit/s`."""
    return _needed_words(needed, "link", _rate)


def break_even_words(
    found: BreakEven, nodes: int, link_gbit_per_s: float | None = None, *, shortly: bool = False
) -> str:
    """Which nodes become faster than which one, at what link, and what the link is: for the layout that can win."""
    # One node against itself, spread over several, cannot win.
    needed, workers = found.full_beats_one or found.beats_one, format_count(found.one_node_workers, "worker")
    each = f" with {workers} each" if found.full_beats_one is not None else ""
    sides, words = (f"{format_count(nodes, 'node')}{each}", f"1 node with {workers}"), link_words(needed)
    yours = f"; yours is {format_rate(link_gbit_per_s)}" if link_gbit_per_s is not None else ""
    if not words.startswith(("between", "about", "at most", "at least", "from")):
        return f"{sides[0]} against {sides[1]}: {words}"
    of = "" if words.startswith(("between", "from")) else "of "
    if shortly:
        return f"at a link {of}{words}{yours.replace(' is ', ': ')}"
    return f"{sides[0]} become faster than {sides[1]} at a link rate {of}{words}{yours}"


def accumulation_words(needed: Needed) -> str:
    """Micro-batches per step, and what they make of the global batch."""
    if needed.value is None:
        return _count(needed)
    # An earlier release stored no range.
    if needed.low is None:
        return f"{needed.value:g}; {needed.why}"
    return f"{_count(needed)}; at {needed.value:g} {needed.why}"


def _count(needed: Needed) -> str:
    return _needed_words(needed, "accumulation", lambda count, _: f"{count:g}")


def _needed_words(needed: Needed, noun: str, told: Callable[[float, int], str]) -> str:
    """What is needed of a noun; `told` writes an amount with its unit, -1 rounds it down, 1 up."""
    if needed.low is None:
        return needed.why
    is_any, low = needed.low <= SLOWEST_GBIT_PER_S, told(needed.low, -1)
    if needed.high is None and is_any:
        return f"inconclusive: any {noun} may be enough, or none"
    if needed.high is None:
        is_apart = needed.value is not None and needed.value > _ONE_FIGURE * needed.low
        likely = f"about {told(needed.value or 0, 0)}, " if is_apart else ""
        return f"{likely}at least {low}; within the prediction error, possibly no {noun} is enough"
    if is_any:
        return needed.why if needed.high <= SLOWEST_GBIT_PER_S else f"at most {told(needed.high, 1)}"
    if needed.high / needed.low <= _ONE_FIGURE:
        return f"about {told(needed.value or needed.high, 0)}"
    return f"between {format_range(low, 'and', told(needed.high, 1))}"


def _rate(gbit_per_s: float, way: int) -> str:
    if not way:
        return format_rate(gbit_per_s)
    unit = 10.0 ** (math.floor(math.log10(gbit_per_s)) - 1)
    digits = gbit_per_s / unit
    return format_rate((math.ceil(digits - _ROUNDING) if way > 0 else math.floor(digits + _ROUNDING)) * unit)


def launch_command(job: str, hosts: str, options: str) -> str:
    """The launch of the YAML that was measured, on the nodes that were; of a script, an empty `job`, options alone."""
    return f"multinode launch{hosts_option(hosts)} {shlex.quote(job)} {options}".rstrip() if job else options
