"""The command as a whole: its list of verbs, what every verb takes, and the completion that a shell asks for."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from multinode.cli.main import build_app
from multinode.cli.output import note, set_verbosity
from multinode.cli.verbs import VERBS, load_verb
from multinode.errors import UsageError
from multinode.launch.context import load_nodes
from tests import make
from tests.golden import Golden

RUN = "20260102-030405-abcd"
# As `multinode completion bash` is used: the shell has words and a cursor, and asks its function.
_ASK = """
eval "$(multinode completion bash)"
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _multinode_completion multinode
echo "${COMPREPLY[*]}"
"""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a run in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MULTINODE_RUNS", raising=False)
    run = make.run(run_id=RUN, job="sft.yaml", started_s=0.0, ended_s=1.0)
    make.store(tmp_path / "runs", RUN, run=run)
    return tmp_path


@pytest.mark.parametrize(
    ("levels", "shown"),
    [({}, ["a note"]), ({"quiet": True}, []), ({"verbose": True}, ["a note", "a step"])],
    ids=["plain", "quiet", "verbose"],
)
def test_what_is_logged_goes_to_stderr_as_was_asked_for(
    capsys: pytest.CaptureFixture[str], levels: dict[str, bool], shown: list[str]
) -> None:
    set_verbosity(**levels)
    note("a note")
    logging.getLogger("multinode.launch").debug("a step")
    written = capsys.readouterr()
    assert written.out == ""
    assert [line.split(" ", 1)[1] if "step" in line else line for line in written.err.splitlines()] == shown


def test_every_verb_is_listed_in_a_section_with_its_whole_summary() -> None:
    shown = CliRunner().invoke(build_app(), ["--help"], terminal_width=80).stdout
    listed = dict(re.findall(r"^  ([a-z-]+) +(\S.*)$", shown, re.MULTILINE))
    assert {name: listed[name] for name in VERBS} == {name: verb.summary for name, verb in VERBS.items()}
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    assert re.findall(r"^(\w+):$", shown, re.MULTILINE) == [
        "Options",
        *dict.fromkeys(verb.panel for verb in VERBS.values()),
    ]


def test_listing_the_verbs_imports_none_of_them() -> None:
    code = """if True:
        import sys
        from multinode.cli.main import build_app
        try:
            build_app()(["--help"])
        except SystemExit:
            print(*sorted(name for name in sys.modules if name.startswith("multinode.")), file=sys.stderr)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert done.stderr.split() == [
        "multinode.cli",
        "multinode.cli.main",
        "multinode.cli.panels",
        "multinode.cli.verbs",
        "multinode.errors",
    ]


def every_command(command: Any, *words: str) -> Iterator[tuple[str, ...]]:
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from every_command(inner, *words, name)


@pytest.mark.parametrize("verb", VERBS)
def test_a_help_fits_two_screens_and_is_in_words_that_can_be_typed(verb: str) -> None:
    for words in every_command(load_verb(verb), verb):
        shown, whole = (
            CliRunner().invoke(build_app(), [*words, option], terminal_width=100).stdout
            for option in ("--help", "--help-all")
        )
        assert len(shown.splitlines()) <= 80, words
        assert max(map(len, shown.splitlines())) <= 100
        # Typer's names of types, of names and of ranges.
        assert re.findall(r"<\w[^>]*>|\{\w+\}|\bx[<>]=|<=x|<int|<str", shown + whole) == []


def test_what_a_long_help_leaves_out_is_behind_help_all() -> None:
    shown, whole = (
        CliRunner().invoke(build_app(), ["launch", option], terminal_width=100).stdout
        for option in ("--help", "--help-all")
    )
    left_out = int(re.findall(r"^(\d+) more options: \S+ launch --help-all$", shown, re.MULTILINE)[0])
    options = [re.findall(r"^  (?:-\w, )?(--[a-z-]+)", text, re.MULTILINE) for text in (shown, whole)]
    assert ("--hosts" in options[0], "--lease" in options[0]) == (True, False)
    assert set(options[0]) < set(options[1])
    assert len(options[1]) == len(options[0]) + left_out
    assert "At least 5." in " ".join(whole.split())
    # A verb that is short has no more to show.
    assert "--help-all" not in CliRunner().invoke(build_app(), ["show", "--help"]).stdout


@pytest.mark.parametrize("words", [("-h",), ("show", "-h"), ("lab", "-h"), ("lab", "up", "-h")])
def test_help_has_a_short_option_everywhere(words: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(build_app(), list(words))
    assert (shown.exit_code, "-h, --help" in shown.stdout) == (0, True)


def test_without_a_verb_the_help_is_shown() -> None:
    result = CliRunner().invoke(build_app(), [])
    assert "Usage: " in result.output


@pytest.mark.parametrize(
    ("words", "usual"),
    [
        ("--hostfile mine --nnodes 1 --nproc-per-node 2", "--hosts mine --nodes 1 --workers-per-node 2"),
        ("--hostfile=mine --num_nodes=1 --num_gpus=2", "--hosts mine --nodes 1 --workers-per-node 2"),
        ("--hosts mine --nproc_per_node 2 --master_port 4000", "--hosts mine --workers-per-node 2 --master-port 4000"),
        ("-H mine --nodes 1 --workers-per-node 2", "--hosts mine --nodes 1 --workers-per-node 2"),
        ("-H a:2,b:2", "--hosts a:2,b:2"),
        ("--host a:2,b:2 --nnodes 1", "--hosts a:2,b:2 --nodes 1"),
        ("--hosts mine --num_machines 1 --main_process_port 4000", "--hosts mine --nodes 1 --master-port 4000"),
    ],
)
def test_options_have_the_names_of_other_launchers_as_well(runs: Path, words: str, usual: str) -> None:
    (runs / "mine").write_text("a addr=10.0.0.1 slots=2\nb addr=10.0.0.2 slots=2\n")
    shown = [
        CliRunner().invoke(build_app(), ["launch", "--dry-run", *options.split(), "--", "train.py", "--nnodes", "3"])
        for options in (words, usual)
    ]
    assert shown[0].exit_code == 0, shown[0].stderr
    # Each run has an id, and ports, of its own.
    first, second = (re.sub(r"\d{8}-\d{6}-\w{4}|\b[12]\d{4}\b", "", one.stdout) for one in shown)
    assert first == second
    assert set(re.findall(r"(?<=/)train\.py .*|(?<= )train\.py --.*", first)) == {"train.py --nnodes 3"}


@pytest.mark.parametrize(
    ("words", "average"),
    [
        ("launch --sync-every 16 --nodes 2 --sync-dtype=fp16 -- train.py --diloco 8", "local:16:fp16"),
        ("contrast --diloco=64:0.5 train.yaml", "diloco:64:0.5"),
        ("predict last --sync-every none,4 --sync-dtype none,bf16", "none,local:4,local:4:bf16"),
    ],
)
def test_the_options_that_average_replaces_are_answered_with_its_value(words: str, average: str) -> None:
    error = CliRunner().invoke(build_app(), words.split()).exception
    assert isinstance(error, UsageError)
    assert error.message.startswith("no such option: --")
    assert error.hint == f"--average {average}"


@pytest.mark.parametrize(
    ("words", "usual"), [("ps", "runs"), ("status", "show"), ("table", "show"), ("run --help", "launch --help")]
)
@pytest.mark.usefixtures("runs")
def test_a_verb_that_is_called_otherwise_elsewhere_is_the_verb(words: str, usual: str) -> None:
    typed, ours = (CliRunner().invoke(build_app(), line.split()) for line in (words, usual))
    assert (typed.exit_code, typed.stdout) == (0, ours.stdout)


def test_a_command_line_that_cannot_be_read_is_answered_with_what_to_type(golden: Golden) -> None:
    every = (
        "lanch",
        "launch --workers-per-nod 2 -- t.py",
        "launch --gpus 2 -- t.py",
        "launch -f x -- t.py",
        "launch --workers-per-node two -- t.py",
        "show a b --all",
        "stop a b",
        "launch --hosts",
        # Options of other launchers.
        "launch --include node1:0 -- train.py",
        "launch --exclude=node2 -- train.py",
        "launch -np 4 -- train.py",
        "launch --num_processes 4 -- train.py",
        "launch --gpu_ids 0,1 -- train.py",
        "launch --node_rank 1 -- train.py",
        "launch --rdzv_endpoint=a:29400 -- train.py",
        # Commands that lack the dashes.
        "torchrun --nproc_per_node 2 train.py",
        "train.py --lr 1",
        "launch train.py --hosts mine --lr 1",
        "launch --nnodes 2 torchrun train.py",
        "check train.sh",
        "launch --copy-code tests/warm.py",
        "contrast --repeats 3 ./a/train.py",
        "launch train.py --token hf_s3cretS3CRETs3cret1234",
    )
    refused = {
        words: CliRunner().invoke(build_app(), words.split(), prog_name="multinode").exception for words in every
    }
    golden.check_errors("refused_command_lines", refused)
    assert {error.exit_code for error in refused.values() if isinstance(error, UsageError)} == {2}
    assert all(isinstance(error, UsageError) for error in refused.values())


@pytest.mark.parametrize(
    ("alias", "usual"),
    [
        ("hostfile", "hosts"),
        ("nnodes", "nodes"),
        ("nproc-per-node", "workers-per-node"),
        ("master-port", "master-port"),
        ("max-restarts", "restarts"),
    ],
)
def test_every_verb_that_has_an_option_takes_the_usual_names_of_it(alias: str, usual: str) -> None:
    able = [name for name in VERBS if any(f"--{usual}" in one.opts for one in load_verb(name).params)]
    assert able
    for name in able:
        for spelling in (alias, alias.replace("-", "_")):
            said = str(CliRunner().invoke(build_app(), [name, f"--{spelling}"]).exception)
            assert f"option '--{usual}' requires an argument" in said, (name, spelling, said)


def test_a_scripts_own_option_of_such_a_name_is_the_scripts(runs: Path) -> None:
    (runs / "mine").write_text("a addr=10.0.0.1 slots=2\n")
    script = ["train.py", "--include", "x", "-H", "8"]
    planned = CliRunner().invoke(build_app(), ["launch", "--dry-run", "--json", "--hosts", "mine", "--", *script])
    (node,) = json.loads(planned.stdout)["nodes"]
    assert node["command"]["argv"][-len(script) :] == script


def test_help_and_version_are_verbs_to_whoever_types_them() -> None:
    def shown(*words: str) -> str:
        return CliRunner().invoke(build_app(), list(words)).stdout

    assert shown("help") == shown("--help") != ""
    assert shown("help", "lab", "up") == shown("lab", "up", "--help") != ""
    assert shown("version") == shown("--version") != ""


@pytest.mark.parametrize("verb", ["launch", "advise", "check", "init", "completion"])
def test_a_command_below_the_help_of_a_verb_stands_on_one_line(verb: str) -> None:
    shown = CliRunner().invoke(build_app(), [verb, "--help"], terminal_width=80).stdout
    commands = [line for line in shown.splitlines() if "multinode " in line and not line.startswith("Usage")]
    assert commands
    assert [line for line in commands if line.rstrip().endswith((" --", " |", " -"))] == []


def test_a_verb_with_an_underscore_is_the_verb() -> None:
    assert CliRunner().invoke(build_app(), ["nccl_test", "--help"]).exit_code == 0


def test_max_restarts_is_restarts(runs: Path, golden: Golden) -> None:
    (runs / "mine").write_text("a addr=10.0.0.1 slots=2\n")
    words = ["--hosts", "mine", "--max_restarts", "1", "--detach", "--", "train.py"]
    asked = CliRunner().invoke(build_app(), ["launch", *words])
    golden.check_errors("refused_restarts", {" ".join(words): asked.exception})


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("words", [("-q", "show"), ("show", "-q")])
def test_quiet_leaves_the_results_alone(words: tuple[str, ...]) -> None:
    told = CliRunner().invoke(build_app(), ["show"])
    quiet = CliRunner().invoke(build_app(), [*words])
    assert told.stderr.startswith("results: ")
    assert (quiet.stdout, quiet.stderr) == (told.stdout, "")


def test_a_hostfile_that_was_not_named_is_told_and_what_named_it(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (runs / "mine").write_text("a addr=10.0.0.1 slots=1\n")
    monkeypatch.setenv("MULTINODE_HOSTS", "mine")
    dry_run = ["launch", "--dry-run", "--", "train.py"]
    assert CliRunner().invoke(build_app(), dry_run).stderr == "hostfile: mine ($MULTINODE_HOSTS)\n"
    assert CliRunner().invoke(build_app(), ["-q", *dry_run]).stderr == ""
    assert CliRunner().invoke(build_app(), ["launch", "--hosts", "mine", *dry_run[1:]]).stderr == ""
    # The next command has --hosts where this one had.
    assert (load_nodes("mine").cluster.hosts, load_nodes().cluster.hosts) == ("mine", "")


@pytest.mark.parametrize("by", ["--hosts", "$MULTINODE_HOSTS", "multinode.toml"])
def test_a_list_of_nodes_stands_wherever_a_hostfile_does(runs: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    if by == "$MULTINODE_HOSTS":
        monkeypatch.setenv("MULTINODE_HOSTS", "n[1-2]:2")
    elif by == "multinode.toml":
        (runs / "multinode.toml").write_text('[defaults]\nhosts = "n[1-2]:2"\n')
    named = ["--hosts", "n[1-2]:2"] if by == "--hosts" else []
    result = CliRunner().invoke(build_app(), ["launch", "--dry-run", *named, "--", "train.py"])
    assert (result.exit_code, result.stderr) == (0, "" if named else f"hostfile: n[1-2]:2 ({by})\n")
    assert "4 workers, 2 on each of 2 nodes" in result.stdout
    nodes = load_nodes("n[1-2]:2" if named else None)
    # What a hint repeats, and what a run keeps.
    assert (nodes.cluster.hosts, nodes.hostfile) == ("n[1-2]:2" if named else "", "n[1-2]:2\n")


def test_without_runs_that_is_what_is_said(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTINODE_RUNS", "none")
    said = CliRunner().invoke(build_app(), ["show"]).exception
    assert str(said) == "there are no runs in none yet"
    assert CliRunner().invoke(build_app(), ["runs"]).stdout == "there are no runs in none yet\n"
    assert runs.is_dir()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("show", ""), ["last", RUN]),
        (("show", "2026"), [RUN]),
        (("compare", "last", "2026"), [RUN]),
        (("launch", "--hosts", ""), ["lab", "auto", "hosts.txt", "hostfiles/two"]),
        (("launch", "--hosts", "ho"), ["hosts.txt", "hostfiles/two"]),
        (("launch", "--on-hang", ""), ["report", "stop"]),
        (("nccl-test", "--min"), ["--min-busbw"]),
        (("nc",), ["nccl-test"]),
        (("lab", "r"), ["rate"]),
    ],
)
def test_bash_completes_runs_hostfiles_verbs_and_options(
    runs: Path, words: tuple[str, ...], offered: list[str]
) -> None:
    (runs / "hosts.txt").touch()
    (runs / "hostfiles").mkdir()
    (runs / "hostfiles" / "two").touch()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    asked = subprocess.run(
        ["bash", "--norc", "-c", _ASK, "bash", "multinode", *words],
        capture_output=True, text=True, timeout=600, check=True, cwd=runs, env=os.environ | {"PATH": path},
    )  # fmt: skip
    assert asked.stdout.split() == offered
    assert asked.stderr == ""


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script_too(shell: str) -> None:
    script = CliRunner().invoke(build_app(), ["completion", shell]).stdout
    assert f"_MULTINODE_COMPLETE=complete_{shell}" in script
