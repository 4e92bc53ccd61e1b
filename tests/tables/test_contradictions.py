from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.predict.rounded import parse_rounded
from multinode.stats.estimate import Estimate, exactly
from multinode.sweep.contradictions import find_contradictions


def figures(**texts: str | int) -> dict[str, Estimate]:
    """Texts as they are published, rounded; numbers of things as they are."""
    return {name: exactly(text) if isinstance(text, int) else parse_rounded(text) for name, text in texts.items()}


def sentences(row: dict[str, Estimate]) -> tuple[str, ...]:
    return tuple(found.message for found in find_contradictions(row))


# A training that could have been: 2048 samples, twice, in steps of 128.
WHOLE = figures(
    world_size=4,
    nodes=2,
    workers_per_node=2,
    per_device_batch=8,
    all_devices_batch=32,
    accumulation=4,
    global_batch=128,
    dataset_samples=2048,
    epochs=2,
    steps=32,
    tokens=2048 * 500,
    tokens_per_sample="500.0",
    samples_per_s="20.11",
    steps_per_s="0.1571",
    step_time_ms="6365",
    tokens_per_s="10055",
    tgs="2513.8",
    whole_s="203.70",
)


def test_a_row_whose_figures_fit_together_has_no_contradiction() -> None:
    assert find_contradictions(WHOLE) == ()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"global_batch": 64, "all_devices_batch": 16}, "GPUs x accumulation x batch per GPU is 128: 50.0% less"),
        ({"all_devices_batch": 33}, "the batch of all GPUs is 33, but GPUs x batch per GPU is 32: 3.1% more"),
        ({"accumulation": 8}, "the global batch is 128, but batch of all GPUs x accumulation is 256: 50.0% less"),
        ({"nodes": 1}, "the number of GPUs is 4, but nodes x workers per node is 2: 100.0% more"),
        ({"whole_s": "303.70"}, "samples/s x runtime is 6,107.41, but samples x epochs is 4,096: 49.1% more"),
        ({"epochs": 3}, "samples/s x runtime is 4,096.41, but samples x epochs is 6,144: 33.3% less"),
        ({"steps": 64}, "steps/s x runtime is 32.0013, but the number of steps is 64: 50.0% less"),
        ({"steps": 64}, "the number of steps is 64, but samples x epochs / global batch is 32: 100.0% more"),
        ({"steps_per_s": "0.1471"}, "samples/s divided by steps/s is 136.71, but the global batch is 128: 6.8% more"),
        (
            {"step_time_ms": "5365"},
            "samples/s x step time in ms is 107,890, but 1000 x the global batch is 128,000: 15.7% less",
        ),
        ({"tokens_per_s": "9055"}, "tokens/s is 9,055, but samples/s x tokens / samples is 10,055: 9.9% less"),
        ({"tokens_per_sample": "512.0"}, "tokens per sample is 512, but tokens / samples is 500: 2.4% more"),
        ({"tgs": "10055"}, "tokens/s per GPU x GPUs is 40,220, but tokens/s is 10,055: 300.0% more"),
    ],
)
def test_what_does_not_fit_is_named_with_its_size(wrong: dict[str, str | int], named: str) -> None:
    assert any(named in sentence for sentence in sentences(WHOLE | figures(**wrong)))


def test_tokens_are_held_against_the_runtime_where_no_samples_are_told() -> None:
    row = figures(tokens_per_s="1000.0", whole_s="100.0", tokens=90_000, epochs=1)
    assert sentences(row) == ("tokens/s x runtime is 100,000, but tokens x epochs is 90,000: 11.1% more",)


def test_what_does_not_fit_is_kept_as_two_formulas_and_their_values() -> None:
    row = figures(samples_per_s="20.11", whole_s="203.70", dataset_samples=2048, epochs=3)
    (found,) = find_contradictions(row)
    assert found.sides == ("samples_per_s*whole_s", "dataset_samples*epochs")
    assert found.values == pytest.approx((4096.41, 6144), rel=1e-5)


@pytest.mark.parametrize(("seconds", "fits"), [("102.0", True), ("102.2", False), ("98.1", True), ("97.9", False)])
def test_two_percent_are_allowed_for(seconds: str, fits: bool) -> None:  # noqa: FBT001 - a column of the table above
    row = figures(samples_per_s="10.00000", whole_s=seconds, dataset_samples=1000, epochs=1)
    assert (find_contradictions(row) == ()) == fits


@pytest.mark.parametrize(("speed", "fits"), [("0.3", True), ("0.30", False)])
def test_the_digits_of_a_figure_are_allowed_for_beside_them(speed: str, fits: bool) -> None:  # noqa: FBT001 - as above
    # 0.3 is anything from 0.25 to 0.35, and 0.30 is not 0.34.
    row = figures(samples_per_s=speed, whole_s="1000.0", dataset_samples=340, epochs=1)
    assert (find_contradictions(row) == ()) == fits


@pytest.mark.parametrize("steps", [8, 9])
def test_the_last_step_of_an_epoch_may_be_partial_or_left_out(steps: int) -> None:
    speed = f"{1100 / 100:.3f}"
    row = figures(
        dataset_samples=1100,
        epochs=1,
        global_batch=128,
        steps=steps,
        whole_s="100.00",
        samples_per_s=speed,
        steps_per_s=f"{steps / 100:.4f}",
    )
    assert find_contradictions(row) == ()
    assert find_contradictions(row | figures(steps=11)) != ()


@given(st.sets(st.sampled_from(sorted(WHOLE))))
def test_what_is_not_told_contradicts_nothing(left_out: set[str]) -> None:
    assert find_contradictions({name: figure for name, figure in WHOLE.items() if name not in left_out}) == ()


@given(st.dictionaries(st.sampled_from(sorted(WHOLE)), st.floats(1e-12, 1e15).map(exactly)))
def test_any_figures_get_sentences_and_no_error(row: dict[str, Estimate]) -> None:
    assert all(sentence.endswith((" more", " less")) for sentence in sentences(row))
