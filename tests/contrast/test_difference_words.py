from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from multinode.contrast import judge
from multinode.contrast.figures import Side, name_side
from multinode.contrast.judge import require_alike
from multinode.errors import UsageError
from multinode.levers.averaging import Averaging
from multinode.levers.levers import Levers
from tests.contrast.made_up_sides import SETTINGS, side_of
from tests.levers.compressed import compressed

MODES = ("same-workers", "scale-out", "fixed-global-batch", "compare")


def find_differences(baseline: Side, candidate: Side, mode: str) -> tuple[str, ...]:
    """In words, the sides called A and B."""
    found = judge.find_differences(baseline, candidate, mode)
    names = {name_side(baseline, mode): "A", name_side(candidate, mode): "B"}
    words = re.compile("|".join(map(re.escape, names)), re.IGNORECASE)
    return tuple(words.sub(lambda name: names[name.group().lower()], one) for one in found)


def pair(mode: str = "same-workers", **other: Any) -> tuple[Side, Side]:
    """Two sides of the same global batch, the second with other settings."""
    workers = 1 if mode == "same-workers" else 2
    settings = msgspec.structs.replace(SETTINGS, **other)
    return side_of("baseline", 10.0), side_of("candidate", 10.0, 2, workers, settings=settings, global_batch=4)


TRAINED = [
    ("model", "other", "Model: tiny on A, other on B."),
    ("dataset", "more", "Dataset: made_up on A, more on B."),
    ("stage", "pt", "Stage: sft on A, pt on B."),
    ("method", "lora", "Method: full on A, lora on B."),
    ("sequence_length", 256, "Sequence length: 128 on A, 256 on B."),
    ("precision", "bf16", "Precision: fp32 on A, bf16 on B."),
]


@pytest.mark.parametrize(("name", "value", "said"), TRAINED)
def test_another_training_is_refused_unless_it_is_asked_for_and_then_marked(name: str, value: Any, said: str) -> None:
    baseline, candidate = pair(**{name: value})
    with pytest.raises(UsageError, match="did not train the same") as refused:
        require_alike(baseline, candidate)
    assert f"{name.replace('_', ' ')} {getattr(SETTINGS, name)!r} and {value!r}" in refused.value.message
    assert "--force" in (refused.value.hint or "")
    require_alike(baseline, candidate, anyway=True)
    assert find_differences(baseline, candidate, "compare") == (said,)


@pytest.mark.parametrize("name", [name for name, _, _ in TRAINED])
def test_what_one_side_does_not_tell_refuses_nothing_and_is_said(name: str) -> None:
    unknown: dict[str, Any] = {name: None}
    baseline, candidate = pair(**unknown)
    require_alike(baseline, candidate)
    (said,) = find_differences(baseline, candidate, "compare")
    assert said.endswith("unknown on B.")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"strategy": "ZeRO-2"}, "Strategy: DDP on A, ZeRO-2 on B."),
        ({"per_device_batch": 4}, "Per-device batch: 2 on A, 4 on B."),
        ({"packing": True}, "Packing: unknown on A, on on B."),
        ({"command": "train.py\x1b[2J"}, "Command: unknown on A, train.py [2J on B."),
        ({"levers": compressed("x" * 99)}, f"Gradient compression: none on A, {'x' * 57}..."),
        (
            {"levers": Levers(averaging=Averaging(every=16))},
            "Averaging between nodes: none on A, every 16 steps (local SGD) on B.",
        ),
    ],
)
def test_other_settings_are_marked_and_refuse_nothing(other: dict[str, Any], said: str) -> None:
    baseline, candidate = pair(**other)
    require_alike(baseline, candidate)
    (found,) = find_differences(baseline, candidate, "same-workers")
    assert found.startswith(said)


@pytest.mark.parametrize("mode", MODES)
def test_accumulation_may_differ_only_where_the_samples_of_a_step_are_held_equal(mode: str) -> None:
    found = find_differences(*pair(mode, accumulation=4), mode)
    said = ("Gradient accumulation: 1 on A, 4 on B.",)
    assert found == (() if mode == "fixed-global-batch" else said)


@pytest.mark.parametrize("mode", MODES)
def test_sides_that_are_alike_differ_in_nothing(mode: str) -> None:
    assert find_differences(*pair(mode), mode) == ()


@pytest.mark.parametrize("mode", ["scale-out", "compare"])
def test_a_larger_global_batch_says_what_it_means_for_the_training(mode: str) -> None:
    (said,) = find_differences(side_of("baseline", 10.0), side_of("candidate", 10.0, 4), mode)
    assert said.startswith("Global batch: 4 on A, 16 on B, so 1/4 of the optimizer steps per epoch")
    assert "learning rate" in said


@pytest.mark.parametrize("mode", ["same-workers", "fixed-global-batch"])
def test_a_global_batch_that_was_to_be_the_same_and_is_not_is_said(mode: str) -> None:
    (said,) = find_differences(side_of("baseline", 10.0), side_of("candidate", 10.0, 2), mode)
    assert said.endswith("although both should train the same number.")


@pytest.mark.parametrize(("role", "nodes"), [("point", 2), ("each-node", 1)])
def test_further_sides_do_not_repeat_what_the_global_batch_means(role: str, nodes: int) -> None:
    baseline, further = side_of("baseline", 10.0, 2), side_of(role, 10.0, nodes, workers_per_node=1)
    assert find_differences(baseline, further, "scale-out") == ()


def test_of_further_sides_versions_are_compared_too() -> None:
    alone = side_of("each-node", 10.0, node_names=("n2",), versions={"torch": "2.12.0"})
    (said,) = find_differences(side_of("baseline", 10.0, versions={"torch": "2.13.0"}), alone, "scale-out")
    assert said == "torch: 2.13.0 on A, 2.12.0 on B."


def test_versions_that_differ_are_marked_and_unknown_ones_are_not() -> None:
    baseline = side_of("baseline", 10.0, versions={"torch": "2.13.0", "nccl": "2.27.5"})
    same, none = side_of("candidate", 10.0, versions=dict(baseline.versions)), side_of("candidate", 10.0)
    assert find_differences(baseline, same, "compare") == find_differences(baseline, none, "compare") == ()
    other = side_of("candidate", 10.0, versions={"torch": "2.13.0"})
    assert find_differences(baseline, other, "compare") == ("nccl: 2.27.5 on A, unknown on B.",)


def test_another_link_is_marked_between_stored_runs() -> None:
    slow = side_of("baseline", 10.0, 2, link_gbit_per_s=0.1)
    fast, unknown = side_of("candidate", 10.0, 2, link_gbit_per_s=1.0), side_of("candidate", 10.0, 2)
    assert find_differences(slow, fast, "compare") == ("Link: 100 Mbit/s on A, 1 Gbit/s on B.",)
    assert find_differences(slow, unknown, "compare") == find_differences(slow, slow, "compare") == ()


def test_settings_that_a_run_did_not_keep_are_said_once() -> None:
    (said,) = find_differences(side_of("baseline", 10.0), side_of("candidate", 10.0, settings=None), "compare")
    assert said == "B did not record its settings: whether they match is unknown."
