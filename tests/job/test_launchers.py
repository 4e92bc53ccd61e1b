"""The table of launchers is that of their own parsers: no option is missing, and each takes as many values."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from multinode.job.launchers import LAUNCHERS, OF_ENGINE, RESTARTS, WORKERS, find_meaning, find_option

_DUMP = """
import argparse, json, sys
def dump(parser):
    return {
        name.lstrip("-").replace("_", "-"): action.nargs != 0
        for action in parser._actions for name in action.option_strings if action.dest != "help"
    }
kept = []
def keep(self, *rest, **more):
    kept.append(self)
    raise SystemExit
if sys.argv[1] == "accelerate launch":
    from accelerate.commands.launch import launch_command_parser
    print(json.dumps(dump(launch_command_parser())))
    raise SystemExit
argparse.ArgumentParser.parse_args = keep
if sys.argv[1] == "torchrun":
    from torch.distributed.run import parse_args
elif sys.argv[1] == "python -m torch.distributed.launch":
    from torch.distributed.launch import parse_args
elif sys.argv[1] == "deepspeed":
    from deepspeed.launcher.runner import parse_args
else:
    from deepspeed.launcher import launch
    parse_args = lambda _: launch.parse_args()
try:
    parse_args([])
except SystemExit:
    print(json.dumps(dump(kept[-1])))
"""


def parsed(name: str) -> dict[str, bool]:
    """The options of a launcher's own parser, each with whether a value follows."""
    env = os.environ | {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run(  # noqa: PLW1510 - its output says what was wrong
        [sys.executable, "-W", "ignore", "-c", _DUMP, name], capture_output=True, text=True, timeout=600, env=env
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, bool] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.torch
@pytest.mark.parametrize("name", ["torchrun", "python -m torch.distributed.launch", "accelerate launch", "deepspeed"])
def test_every_option_of_a_launcher_is_in_the_table_with_its_number_of_values(name: str) -> None:
    options = {option: entry.takes_value for option, entry in LAUNCHERS[name].options.items()}
    assert options == parsed(name)


@pytest.mark.torch
def test_what_is_passed_to_deepspeed_is_known_to_its_launcher_of_one_node() -> None:
    own = {name: entry.takes_value for name, entry in OF_ENGINE["deepspeed"].options.items() if entry.meaning.is_passed}
    known = parsed("deepspeed.launcher.launch")
    assert {name: known.get(name) for name in own} == own


def test_an_option_is_found_by_any_spelling_and_by_its_beginning() -> None:
    torchrun = LAUNCHERS["torchrun"]
    for word in ("--nproc-per-node", "--nproc_per_node=2", "--nproc_per"):
        found = find_option(torchrun, word)
        assert found is not None
        assert (found.meaning, found.takes_value) == (WORKERS, True)
    assert find_option(torchrun, "--r") is None
    assert find_option(torchrun, "--nonsense") is None


def test_an_option_of_our_own_name_has_a_meaning_only_where_there_is_a_word_on_it() -> None:
    assert find_meaning("max-restarts") is RESTARTS
    assert find_meaning("tee") is None
    assert find_meaning("lr") is None
