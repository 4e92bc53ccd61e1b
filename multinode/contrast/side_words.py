"""How sentences name sides and write their figures, and what differs between them."""

from __future__ import annotations

from multinode.contrast.comparability import Difference
from multinode.contrast.figures import Side
from multinode.units import format_count, format_rate

_THREE_DIGITS = 100


def figure(value: float) -> str:
    """Three digits that count, above the point all of them: `1342`, `24.1`, `0.512`."""
    return f"{value:.0f}" if abs(value) >= _THREE_DIGITS else f"{value:.3g}"


def milliseconds(time_ms: float) -> str:
    """`1342 ms`, `4.2 ms`."""
    return f"{figure(time_ms)} ms"


def name_nodes(side: Side) -> str:
    """`1 node`, `2 nodes`; of one node alone its name."""
    if side.role == "each-node" and side.node_names:
        return side.node_names[0]
    return format_count(side.nodes, "node")


def name_side(side: Side, mode: str) -> str:
    """A side within a sentence: `2 nodes`, `n2 alone`; of two stored runs `run 20260104-ab`.

    Args:
        side: of a contrast.
        mode: of the contrast.
    """
    if mode == "compare":
        return f"run {side.run_ids[-1]}"
    return f"{name_nodes(side)} alone" if side.role == "each-node" else name_nodes(side)


def capitalised(sentence: str) -> str:
    """With a capital first letter; the rest as it is, names of nodes too."""
    return sentence[:1].upper() + sentence[1:]


# Settings that are not called by the name of their field.
_NAMES = {
    "lora_rank": "LoRA rank",
    "per_device_batch": "per-device batch",
    "accumulation": "gradient accumulation",
    "recompute": "gradient checkpointing",
    "overlap": "overlap of communication",
    "grad_compress": "gradient compression",
    "averaging": "averaging between nodes",
}
_LEVERS, _NONE = frozenset({"averaging", "grad_compress"}), "none"
_LONGEST = 60


def difference_words(found: Difference, baseline: Side, mode: str) -> str:
    """What differs from the baseline in a contrast of this mode, in one sentence."""
    mine, theirs = name_side(baseline, mode), name_side(found.side, mode)
    if found.kind == "no_settings":
        unknown = " and ".join(name_side(side, mode) for side in (baseline, found.side) if side.settings is None)
        return capitalised(f"{unknown} did not keep the settings: whether they are the same is unknown.")
    if found.kind in {"global_batch", "unequal_batch"}:
        return _batch(found, mine, theirs)
    if found.kind == "link":
        name, ours, other = "link", *(format_rate(one) for one in (found.baseline, found.candidate))
    else:
        name = _NAMES.get(found.name, found.name.replace("_", " ")) if found.kind == "setting" else _written(found.name)
        # Both are left out where there is none.
        values = [_NONE if one is None and found.name in _LEVERS else one for one in (found.baseline, found.candidate)]
        ours, other = map(_written, values)
    said = f"{name} differs: {ours} on {mine}, {other} on {theirs}."
    return said if found.kind == "version" else capitalised(said)


def _batch(found: Difference, mine: str, theirs: str) -> str:
    said = f"Global batch differs: {found.baseline} on {mine}, {found.candidate} on {theirs}"
    if found.kind == "unequal_batch":
        return f"{said}, though both were to train as many."
    times = figure(found.candidate / found.baseline)
    return f"{said}: 1/{times} of the optimizer steps per epoch; learning rate and warm-up may have to change."


def _written(value: object) -> str:
    """As a person would write it, in one line."""
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "on" if value else "off"
    text = "".join(letter if letter.isprintable() else " " for letter in str(value))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
