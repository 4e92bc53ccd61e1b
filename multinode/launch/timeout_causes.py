"""explain_timeout: what a collective may have timed out for, by the run's own figures. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from multinode.core.run.progress import NodeProgress
from multinode.core.run.run import Failure
from multinode.core.run.samples import NicSample, Sample

__all__ = ["explain_timeout", "link_share"]

# Headers and pauses take their part of a link that is full.
_FULL_SHARE = 0.8
_LOOKED_AT_S = 60.0
_LEAST_S = 3.0


def explain_timeout(failure: Failure, nodes: Sequence[NodeProgress], shares: Mapping[str, float | None]) -> Failure:
    """A timeout with the causes that the figures tell of before its hint; any other failure as it is.

    Args:
        failure: the first.
        nodes: how far each was.
        shares: of each node's link, how much was in use before, as `link_share` has it.
    """
    if failure.kind != "timeout":
        return failure
    causes = [*_no_step(nodes), *_full_link(shares)]
    hint = "; or ".join([*causes, *([failure.hint] if failure.hint else [])])
    return msgspec.structs.replace(failure, hint=hint or None)


def link_share(samples: Iterable[Sample], node: NodeProgress, end_s: float) -> float | None:
    """How much of its link a node used in the minute before `end_s` on its own clock, in the busier direction."""
    if not node.link_gbit_per_s:
        return None
    seen = [
        sample
        for sample in samples
        if isinstance(sample, NicSample)
        and sample.ifname == node.ifname
        and end_s - _LOOKED_AT_S <= sample.time_s <= end_s
    ]
    if not seen:
        return None
    first, last = (choose(seen, key=lambda sample: sample.mono_ns) for choose in (min, max))
    took_ns = last.mono_ns - first.mono_ns
    moved = (last.rx_bytes - first.rx_bytes, last.tx_bytes - first.tx_bytes)
    # A card that was reset counts anew.
    return max(moved) * 8 / took_ns / node.link_gbit_per_s if took_ns >= _LEAST_S * 1e9 and min(moved) >= 0 else None


def _no_step(nodes: Sequence[NodeProgress]) -> Iterable[str]:
    if any(node.step is not None for node in nodes):
        return
    told = next((f" ({node.name}: {node.stage})" for node in nodes if node.stage), "")
    yield (
        f"no worker had finished a step{told}: where one rank tokenises the data or loads the model, the others wait "
        "in a collective; a longer ddp_timeout, or data that is prepared once (tokenized_path), lets them"
    )


def _full_link(shares: Mapping[str, float | None]) -> Iterable[str]:
    name, share = max(
        ((name, share or 0.0) for name, share in shares.items()), key=lambda one: one[1], default=("", 0.0)
    )
    if share >= _FULL_SHARE:
        yield (
            f"the link of {name} was {min(share, 1.0):.0%} in use in the minute before: the collective was under way, "
            "and the link is too slow for it; send less (multinode advise), or set a longer ddp_timeout"
        )
