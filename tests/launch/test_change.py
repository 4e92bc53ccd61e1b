"""A change as a file: what tune writes is what launch takes, and a typing error in it is refused with its place."""

from __future__ import annotations

import pytest

from multinode.errors import UsageError
from multinode.job.job_files import Change, change_text, parse_change
from multinode.levers.averaging import Averaging
from multinode.levers.balance import Balance
from multinode.levers.levers import Levers
from tests.levers.compressed import compressed

CHANGES = [
    Change(),
    Change(nodes=1, workers_per_node=2),
    Change(levers=Levers(averaging=Averaging(every=16))),
    Change(levers=Levers(averaging=Averaging(every=16, dtype="fp16")), nodes=2),
    Change(levers=Levers(averaging=Averaging(every=64, dtype="bf16", outer_lr=0.7, momentum=0.9))),
    Change(levers=compressed("powersgd:4")),
    Change(levers=Levers(balance=Balance(speeds={"a": 1.5, "b": 1.0}))),
    Change(
        overrides=("gradient_accumulation_steps=4", "deepspeed=null", "learning_rate=0.0001", 'template="1e3"'),
        deepspeed=("zero_optimization.stage=2", "zero_optimization.overlap_comm=true"),
    ),
    Change(overrides=("fsdp=[a, b]", "note='a: b # c'")),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.options or "nothing")
def test_what_is_written_is_read_again(change: Change) -> None:
    text = change_text(change, "by multinode tune:\nlocal SGD")
    assert text.startswith("# by multinode tune: local SGD\n")
    again = parse_change(text, "tuned.yaml")
    assert change_text(again, "x") == change_text(change, "x")
    assert (again.levers, again.nodes) == (change.levers, change.nodes)
    assert len(again.overrides) == len(change.overrides)


def test_the_file_has_the_options_of_launch_by_their_names() -> None:
    change = Change(
        overrides=("gradient_accumulation_steps=4",),
        levers=Levers(averaging=Averaging(every=16, dtype="fp16")),
        workers_per_node=2,
    )
    assert change_text(change, "x") == (
        "# x\nworkers-per-node: 2\naverage: local:16:fp16\nset:\n  gradient_accumulation_steps: 4\n"
    )


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("nodes: 2\ngrad_compress: fp16\n", "f:2: 'grad_compress': Object contains unknown field", "grad-compress"),
        ("nodes: 0\n", "f:1: 'nodes': Expected `int` >= 1", "options of launch"),
        ("- 1\n", "f:1: Expected `object`, got `array`", "options of launch"),
        ("average: often\n", "f: --average often: expected local:H", "diloco:64"),
        ("average: local:4:int8\n", "f: --average local:4:int8: expected local:H", "fp16"),
        # Options that --average replaced.
        ("sync-every: 4\nsync-dtype: bf16\n2: 1\n", "f:1: 'sync-every': Object", "average: local:4:bf16"),
        ("nodes: 2\ndiloco: 64\n", "f:2: 'diloco': Object contains unknown field `diloco`", "average: diloco:64"),
        ("balance: last\n", "f: --balance last: 'last' is not NODE=SPEED", "node0=1.6"),
        ("set:\n  a b: 1\n", "f: --set 'a b=1' is not KEY=VALUE", "--set"),
        ("deepspeed-set:\n  a..b: 1\n", "f: --deepspeed-set 'a..b=1' is not KEY=VALUE", "--deepspeed-set"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place_and_what_would_be_right(text: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_change(text, "f")
    assert str(caught.value).startswith(message)
    assert hint in (caught.value.hint or "")
