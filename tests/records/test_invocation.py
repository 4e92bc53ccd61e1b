from __future__ import annotations

import pytest

from multinode.records.invocation import Invocation

YAML = Invocation(
    verb="launch",
    options=(("--hosts", "lab"), ("--nodes", "2"), ("--set", "max_steps=8"), ("--env", "A=b c"), ("--json",)),
    job=("sft.yaml",),
    alike=("--set", "--env"),
)


@pytest.mark.parametrize(
    ("verb", "options", "line"),
    [
        ("launch", "--nodes 1", "--hosts lab --set max_steps=8 --env 'A=b c' --nodes 1"),
        # One of its own goes only for a new one of its name, and a key not even then.
        ("launch", "--set lora_rank=8", "--hosts lab --nodes 2 --set max_steps=8 --env 'A=b c' --set lora_rank=8"),
        ("launch", "", "--hosts lab --nodes 2 --set max_steps=8 --env 'A=b c'"),
        ("contrast", "--set lora_rank=8", "--hosts lab --set max_steps=8 --env 'A=b c' --set lora_rank=8"),
    ],
)
def test_a_training_is_launched_with_more_options_and_otherwise_as_it_was_typed(
    verb: str, options: str, line: str
) -> None:
    typed = Invocation(verb=verb, options=YAML.options, job=YAML.job, alike=YAML.alike)
    assert typed.launch(options) == f"multinode launch {line} sft.yaml"


def test_the_options_of_a_command_stand_before_it() -> None:
    typed = Invocation(verb="launch", options=(("--hosts", "h"),), job=("--", "train.py", "--lr", "1"))
    assert typed.launch("--nodes 1") == "multinode launch --hosts h --nodes 1 -- train.py --lr 1"
