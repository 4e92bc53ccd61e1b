from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.cluster.cluster import Cluster
from multinode.cluster.hostfile import parse_hostfile
from multinode.job.job import ScriptJob, override_text, parse_overrides
from multinode.series.grid import BATCH, Grid, GridCell, batch_of, measuring_order
from multinode.sweep.grid_plan import (
    cell_arguments,
    cell_overrides,
    parse_arguments,
    parse_axes,
    parse_counts,
    plan_grid,
)
from multinode.sweep.measure import require_plannable
from tests.golden import Golden, error_of
from tests.sweep.sweeping import sweep_of

CLUSTER: Cluster = parse_hostfile("a slots=2\nb slots=2\n", "hosts")
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def cells_of(
    settings: dict[str, tuple[Any, ...]], nodes: tuple[int, ...] = (1, 2), **more: Any
) -> tuple[GridCell, ...]:
    return plan_grid(Grid(settings=settings, nodes=nodes, **more), CLUSTER)


def order_of(grid: Grid) -> list[str]:
    """Labels in the order of measuring, with the number of the turn."""
    cells = plan_grid(grid, CLUSTER)
    return [f"{cells[turn.cell].label}#{turn.number}" for turn in measuring_order(grid, cells)]


def test_every_combination_is_a_cell_and_the_batch_varies_fastest() -> None:
    cells = cells_of({BATCH: (1, 2), "finetuning_type": ("lora", "full")}, workers_per_node=(1, 2))
    assert [cell.label for cell in cells] == [
        f"{nodes}x{workers}-{method}-batch{batch}"
        for nodes in (1, 2)
        for workers in (1, 2)
        for method in ("lora", "full")
        for batch in (1, 2)
    ]
    last = cells[-1]
    assert (last.nodes, last.workers_per_node) == (2, 2)
    assert last.settings == {"finetuning_type": "full", BATCH: 2}
    assert cell_overrides(last) == ("finetuning_type=full", f"{BATCH}=2")


@pytest.mark.parametrize(
    ("text", "written", "values"),
    [
        ("--batch=1,2,4", "--batch", (1, 2, 4)),
        # As they are written: what a script makes of 1e-4 or 007 is its own.
        ("--lr=1e-4,0.001,007", "--lr", ("1e-4", "0.001", "007")),
        ("-b=2, 4", "-b", (2, 4)),
        ("model.depth=2,4", "model.depth", (2, 4)),
        ('--layers="1,2",3', "--layers", ("1,2", 3)),
    ],
)
def test_arguments_of_a_script_reach_it_as_they_are_written(text: str, written: str, values: tuple[Any, ...]) -> None:
    axes, arguments = parse_arguments([text])
    ((name, found),) = axes.items()
    assert (found, arguments) == (values, {name: written})
    grid = Grid(settings=axes, arguments=arguments, nodes=(1,))
    cells = plan_grid(grid, CLUSTER)
    assert [cell_arguments(grid, cell) for cell in cells] == [(f"{written}={value}",) for value in values]


def test_a_grid_of_nodes_alone_needs_no_settings() -> None:
    assert [cell.label for cell in cells_of({})] == ["1-node", "2-nodes"]
    assert [cell.label for cell in cells_of({}, nodes=(2,), workers_per_node=(1, 2))] == ["2x1", "2x2"]


@pytest.mark.parametrize(
    ("key", "values", "labels"),
    [
        ("deepspeed", ("configs/deepspeed/ds_z2.json", None), ["1-node-ds_z2", "1-node-no-deepspeed"]),
        ("packing", (True, False), ["1-node-packing-true", "1-node-packing-false"]),
        ("cutoff_len", (512, 1024), ["1-node-length512", "1-node-length1024"]),
        ("learning_rate", (1e-4, 2.5), ["1-node-learning_rate-0.0001", "1-node-learning_rate-2.5"]),
        ("model_name_or_path", ("models/a/", "hub/b"), ["1-node-a", "1-node-b"]),
        # What reads alike is told apart by a number.
        ("model_name_or_path", ("x/model", "y/model"), ["1-node-model", "1-node-model-2"]),
        ("a", ("\N{SNOWMAN}", "!"), ["1-node-a", "1-node-a-2"]),
    ],
)
def test_a_label_says_what_a_cell_sets(key: str, values: tuple[Any, ...], labels: list[str]) -> None:
    cells = cells_of({key: values}, nodes=(1,))
    assert [cell.label for cell in cells] == labels


@given(st.lists(st.text(max_size=90), min_size=2, max_size=12, unique=True))
def test_every_label_is_unique_and_fit_for_the_name_of_a_run(values: list[str]) -> None:
    labels = [cell.label for cell in cells_of({"key": tuple(values), BATCH: (1, 2)})]
    assert len(set(labels)) == len(labels)
    assert all(RUN_ID.fullmatch(label) for label in labels)


def test_smaller_batches_come_first_and_the_table_keeps_the_users_order() -> None:
    grid = Grid(settings={BATCH: (8, 2, 4), "finetuning_type": ("lora", "full")}, nodes=(1,))
    assert [batch_of(cell) for cell in plan_grid(grid, CLUSTER)] == [8, 2, 4, 8, 2, 4]
    assert order_of(grid) == [f"1-node-{method}-batch{batch}#1" for method in ("lora", "full") for batch in (2, 4, 8)]


def test_repeats_are_made_in_turns_every_second_one_backwards() -> None:
    settings: dict[str, tuple[Any, ...]] = {BATCH: (1, 2)}
    one, two = "1-node-batch1", "1-node-batch2"
    turns = Grid(settings=settings, nodes=(1,), repeats=3)
    assert order_of(turns) == [f"{one}#1", f"{two}#1", f"{two}#2", f"{one}#2", f"{one}#3", f"{two}#3"]
    after = Grid(settings=settings, nodes=(1,), repeats=2, interleave=False)
    assert order_of(after) == [f"{one}#1", f"{one}#2", f"{two}#1", f"{two}#2"]


@given(st.permutations([1, 2, 4, 8]), st.integers(1, 4), st.booleans())
def test_every_cell_is_measured_as_often_as_asked_and_its_first_turn_is_ascending(
    batches: list[int],
    repeats: int,
    interleave: bool,  # noqa: FBT001 - hypothesis gives arguments by position
) -> None:
    grid = Grid(settings={BATCH: tuple(batches)}, nodes=(1, 2), repeats=repeats, interleave=interleave)
    cells = plan_grid(grid, CLUSTER)
    turns = list(measuring_order(grid, cells))
    assert sorted((turn.cell, turn.number) for turn in turns) == [
        (cell, number) for cell in range(len(cells)) for number in range(1, repeats + 1)
    ]
    first = [batch_of(cells[turn.cell]) for turn in turns if turn.number == 1]
    assert first == [1, 2, 4, 8] * 2


TEXTS = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=20)
SCALARS = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("b=1,2,4", (1, 2, 4)),
        ("b=8, 4", (8, 4)),
        ("t=lora,full", ("lora", "full")),
        ("packing=true,false", (True, False)),
        ("lr=1e-4,0.001", (1e-4, 1e-3)),
        ("deepspeed=configs/z2.json,null", ("configs/z2.json", None)),
        ("cutoff_len=1024", (1024,)),
        # A list is one value, and so is a text with a comma that is quoted.
        ("m=[a,b]", (["a", "b"],)),
        ("m=[a],[a,b]", (["a"], ["a", "b"])),
        ("""lora_target="q,v",all""", ("q,v", "all")),
        ("x=1,true,1.0", (1, True, 1.0)),
        ("x='null',null", ("null", None)),
    ],
)
def test_commas_part_values_that_are_each_read_as_yaml(text: str, values: tuple[Any, ...]) -> None:
    axes = parse_axes([text])
    assert list(axes) == [text.partition("=")[0]]
    (found,) = axes.values()
    assert [(type(one), one) for one in found] == [(type(one), one) for one in values]


def test_axes_keep_the_order_in_which_they_were_given() -> None:
    assert list(parse_axes(["b=1,2", "a=x", "c=3,4"])) == ["b", "a", "c"]


def test_counts_are_numbers_from_one_on_each_once() -> None:
    assert parse_counts("--nodes", "2,1") == (2, 1)
    assert error_of(parse_counts, "--nodes", "9" * 5000).hint == "for example --nodes 1,2"


def test_what_is_no_grid_is_refused(golden: Golden) -> None:
    axes = (
        *(["b=1,2", "b=4"], ["b"], ["a-b=1"], ["b="], ["b=1,,2"], ["b=,1"], ["b=1,"], ["b=1,2,1"]),
        ["max_steps=10,20"],
    )
    counts = ("", "0,1", "1,a", "1,,2", "-1", "1.5", "\u0662", "1,2,1")
    script = sweep_of({}, job=ScriptJob(argv=("train.py",)), steps=6)
    golden.check_errors(
        "refused_grid",
        {" ".join(f"--grid {text}" for text in texts): error_of(parse_axes, texts) for texts in axes}
        | {f"--nodes {text[:9]!a}": error_of(parse_counts, "--nodes", text) for text in counts}
        | {
            "more nodes than there are": error_of(cells_of, {}, nodes=(1, 3)),
            "more workers than slots": error_of(cells_of, {}, workers_per_node=(1, 3)),
            "2000 cells": error_of(cells_of, {"a": tuple(range(1000))}),
            "--steps of a script": error_of(require_plannable, script),
        },
    )


@pytest.mark.parametrize("text", ["b=[1,2", "b=a],[b]"])
def test_what_is_no_yaml_is_refused(text: str) -> None:
    """The words are the parser's."""
    error = error_of(parse_axes, [text])
    assert error.message.startswith(f"--grid {text} is not a list of YAML values: ")
    assert error.hint == "quote a string with a comma or bracket: --grid b='\"...\"'"


@given(VALUES)
def test_a_value_comes_back_from_its_text_as_launch_reads_it(value: Any) -> None:
    assert parse_overrides([override_text("key", value)]) == {"key": value}
