from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from multinode.contrast import judge
from multinode.contrast.figures import Side, name_side
from multinode.contrast.judge import require_alike
from multinode.levers.averaging import Averaging
from multinode.levers.levers import Levers
from tests.contrast.made_up_sides import SETTINGS, side_of
from tests.golden import Golden, error_of
from tests.levers.compressed import compressed

MODES = ("same-workers", "scale-out", "fixed-global-batch", "compare")


def find_differences(baseline: Side, candidate: Side, mode: str) -> tuple[str, ...]:
    """In words, the sides called A and B."""
    found = judge.find_differences(baseline, candidate, mode)
    names = {name_side(baseline, mode): "A", name_side(candidate, mode): "B"}
    words = re.compile("|".join(map(re.escape, names)), re.IGNORECASE)
    return tuple(words.sub(lambda name: names[name.group().lower()], one.message) for one in found)


def pair(mode: str = "same-workers", **other: Any) -> tuple[Side, Side]:
    """Two sides of the same global batch, the second with other settings."""
    workers = 1 if mode == "same-workers" else 2
    settings = msgspec.structs.replace(SETTINGS, **other)
    return side_of("baseline", 10.0), side_of("candidate", 10.0, 2, workers, settings=settings, global_batch=4)


TRAINED: dict[str, Any] = {
    "model": "other",
    "dataset": "more",
    "stage": "pt",
    "method": "lora",
    "sequence_length": 256,
    "precision": "bf16",
}


def test_another_training_is_refused_unless_it_is_asked_for(golden: Golden) -> None:
    pairs = {name: pair(**{name: value}) for name, value in TRAINED.items()}
    golden.check_errors("refused_pairs", {name: error_of(require_alike, *sides) for name, sides in pairs.items()})
    for sides in pairs.values():
        require_alike(*sides, anyway=True)


@pytest.mark.parametrize("name", TRAINED)
def test_what_one_side_does_not_tell_refuses_nothing(name: str) -> None:
    unknown: dict[str, Any] = {name: None}
    require_alike(*pair(**unknown))


SETTINGS_BESIDE: dict[str, dict[str, Any]] = {
    "strategy": {"strategy": "ZeRO-2"},
    "per-device batch": {"per_device_batch": 4},
    "packing": {"packing": True},
    "command": {"command": "train.py\x1b[2J"},
    "gradient compression": {"levers": compressed("x" * 99)},
    "averaging": {"levers": Levers(averaging=Averaging(every=16))},
}


@pytest.mark.parametrize("name", SETTINGS_BESIDE)
def test_other_settings_refuse_nothing(name: str) -> None:
    require_alike(*pair(**SETTINGS_BESIDE[name]))


def test_each_difference_is_a_sentence(golden: Golden) -> None:
    """Training, settings and what was beside them, in the modes in which it matters."""
    bare = side_of("baseline", 10.0)
    torch = side_of("baseline", 10.0, versions={"torch": "2.13.0", "nccl": "2.27.5"})
    slow = side_of("baseline", 10.0, 2, link_gbit_per_s=0.1)
    alone = side_of("each-node", 10.0, node_names=("n2",), versions={"torch": "2.12.0", "nccl": "2.27.5"})
    cases: dict[str, tuple[Side, Side, str]] = {
        **{f"{name} {value}": (*pair(**{name: value}), "compare") for name, value in TRAINED.items()},
        "model unknown": (*pair(model=None), "compare"),
        **{name: (*pair(**settings), "same-workers") for name, settings in SETTINGS_BESIDE.items()},
        **{f"accumulation, {mode}": (*pair(mode, accumulation=4), mode) for mode in MODES if mode[0] != "f"},
        "global batch, scale-out": (bare, side_of("candidate", 10.0, 4), "scale-out"),
        "global batch, compare": (bare, side_of("candidate", 10.0, 4), "compare"),
        "global batch, same-workers": (bare, side_of("candidate", 10.0, 2), "same-workers"),
        "global batch, fixed-global-batch": (bare, side_of("candidate", 10.0, 2), "fixed-global-batch"),
        "another version": (torch, alone, "scale-out"),
        "an unknown version": (torch, side_of("candidate", 10.0, versions={"torch": "2.13.0"}), "compare"),
        "link": (slow, side_of("candidate", 10.0, 2, link_gbit_per_s=1.0), "compare"),
        "settings unknown": (bare, side_of("candidate", 10.0, settings=None), "compare"),
    }
    found = {case: find_differences(*sides) for case, sides in cases.items()}
    assert {case: len(said) for case, said in found.items() if len(said) != 1} == {}
    golden.check("differences.txt", "".join(f"# {case}\n{said[0]}\n" for case, said in found.items()))


def test_accumulation_may_differ_where_the_samples_of_a_step_are_held_equal() -> None:
    assert find_differences(*pair("fixed-global-batch", accumulation=4), "fixed-global-batch") == ()


@pytest.mark.parametrize("mode", MODES)
def test_sides_that_are_alike_differ_in_nothing(mode: str) -> None:
    assert find_differences(*pair(mode), mode) == ()


@pytest.mark.parametrize(("role", "nodes"), [("point", 2), ("each-node", 1)])
def test_further_sides_do_not_repeat_what_the_global_batch_means(role: str, nodes: int) -> None:
    baseline, further = side_of("baseline", 10.0, 2), side_of(role, 10.0, nodes, workers_per_node=1)
    assert find_differences(baseline, further, "scale-out") == ()


def test_what_neither_or_only_one_side_knows_of_versions_and_links_is_no_difference() -> None:
    baseline = side_of("baseline", 10.0, versions={"torch": "2.13.0", "nccl": "2.27.5"})
    same, none = side_of("candidate", 10.0, versions=dict(baseline.versions)), side_of("candidate", 10.0)
    assert find_differences(baseline, same, "compare") == find_differences(baseline, none, "compare") == ()
    slow, unknown = side_of("baseline", 10.0, 2, link_gbit_per_s=0.1), side_of("candidate", 10.0, 2)
    assert find_differences(slow, unknown, "compare") == find_differences(slow, slow, "compare") == ()
