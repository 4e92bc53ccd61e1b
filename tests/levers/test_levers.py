"""Levers as one value: from options, to options, joined, left out where they cannot be used."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from multinode.levers.averaging import Averaging
from multinode.levers.axes import LeverAxes
from multinode.levers.balance import Balance
from multinode.levers.compression import Compression
from multinode.levers.levers import NONE, TYPES, Levers
from tests.levers.compressed import compressed

ROUNDS = Levers(averaging=Averaging(every=16, dtype="fp16"))
SPEEDS = Levers(balance=Balance(speeds={"a": 1.5, "b": 1.0}))


@pytest.mark.parametrize(
    ("options", "levers", "typed"),
    [
        ({}, NONE, ""),
        ({"grad_compress": "powersgd:4:10"}, compressed("powersgd:4:10"), "--grad-compress powersgd:4:10"),
        ({"average": "local:16:fp16"}, ROUNDS, "--average local:16:fp16"),
        ({"balance": "a=1.5,b=1"}, SPEEDS, "--balance a=1.5,b=1"),
        (
            {"grad_compress": "fp16", "balance": "a=1.5,b=1"},
            SPEEDS.joined(compressed("fp16")),
            "--grad-compress fp16 --balance a=1.5,b=1",
        ),
    ],
)
def test_levers_are_read_from_options_and_written_as_them(options: dict[str, Any], levers: Levers, typed: str) -> None:
    assert Levers.read(**options) == levers
    assert " ".join(levers.options) == typed


def test_the_second_lever_of_a_kind_wins_and_the_others_stay() -> None:
    assert compressed("fp16").joined(SPEEDS).joined(compressed("bf16")) == SPEEDS.joined(compressed("bf16"))
    assert ROUNDS.joined(NONE) == ROUNDS


def test_a_lever_leaves_out_those_that_it_excludes() -> None:
    assert compressed("fp16").beside(ROUNDS) == NONE
    assert ROUNDS.beside(SPEEDS) == NONE
    assert compressed("fp16").beside(SPEEDS) == compressed("fp16")


def test_on_one_node_only_what_acts_inside_it_is_left() -> None:
    both = SPEEDS.joined(compressed("fp16"))
    assert both.on(1) == compressed("fp16")
    assert both.on(2) == both


@pytest.mark.parametrize(
    ("levers", "exact", "algorithm"),
    [
        (compressed("bf16"), compressed("bf16"), None),
        (compressed("powersgd"), NONE, "its gradients are sent as powersgd"),
        (ROUNDS, NONE, "its nodes average every 16 steps (local SGD), in fp16"),
        (SPEEDS, SPEEDS, None),
    ],
)
def test_levers_tell_whether_they_change_the_algorithm(levers: Levers, exact: Levers, algorithm: str | None) -> None:
    assert (levers.exact, levers.algorithm) == (exact, algorithm)


def test_what_is_stored_has_only_the_levers_that_are_used() -> None:
    assert msgspec.json.encode(NONE) == b"{}"
    stored = msgspec.json.encode(ROUNDS.joined(compressed("fp16")))
    assert msgspec.json.decode(stored, type=Levers) == ROUNDS.joined(compressed("fp16"))


def test_axes_combine_every_value_and_keep_what_was_measured() -> None:
    axes = LeverAxes.read(grad_compress=[None, "fp16"], average=[None, "local:4:bf16"])
    rounds = Averaging(every=4, dtype="bf16")
    half = Compression(kind="fp16")
    assert axes.combined(SPEEDS) == (
        SPEEDS,
        msgspec.structs.replace(SPEEDS, averaging=rounds),
        msgspec.structs.replace(SPEEDS, compression=half),
        msgspec.structs.replace(SPEEDS, compression=half, averaging=rounds),
    )
    assert LeverAxes().combined(compressed("fp16")) == (compressed("fp16"),)


def test_every_lever_has_words_and_a_column_of_its_own() -> None:
    assert list(TYPES) == list(Levers.__struct_fields__)
    assert len({lever.column for lever in TYPES.values()}) == len(TYPES)
    assert all(lever.title and lever.heading and lever.phrase for lever in TYPES.values())
    assert all(name in TYPES for lever in TYPES.values() for name in lever.excludes)
