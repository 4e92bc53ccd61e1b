from __future__ import annotations

import json
import string
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.cluster.cluster import Node
from multinode.cluster.quoting import Command, as_steps, quote_path, render_command
from multinode.secret_values import REDACTED, is_secret

# A program that says what it was given.
_REPORT = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]))"
_REPORTER = (sys.executable, "-I", "-X", "utf8", "-c", _REPORT)
HOME = "/home/a b"


class Seen(NamedTuple):
    argv: list[str]
    env: dict[str, str]
    cwd: str


def run_in_sh(text: str, **environ: str) -> Seen:
    """What a program sees that a real shell was told to start by this text."""
    done = subprocess.run(
        ["/bin/sh"],
        input=text.encode(),
        env={"PATH": "/usr/bin:/bin", "HOME": HOME, **environ},
        capture_output=True,
        timeout=30,
        check=True,
    )
    assert done.stderr == b""
    return Seen(*json.loads(done.stdout))


def with_home(text: str) -> str:
    return HOME + text[1:] if text == "~" or text.startswith("~/") else text


# Whatever the kernel can hand to a program; text that tempts a shell comes up often.
_tempting = st.sampled_from(
    [
        "; touch x #",
        "$HOME",
        "`id`",
        "$(id)",
        "a b",
        "'",
        '"',
        "\\",
        "~",
        "~/a b",
        "~root",
        "*",
        "!x",
        "\n",
        "-n",
        "",
        "&&",
    ]
)
_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
_words = st.lists(_tempting | _text | st.tuples(_tempting, _text).map("".join), max_size=4)
_names = st.text(string.ascii_letters + "_", min_size=1, max_size=8).map("V_".__add__)


@given(
    words=_words, env=st.dictionaries(_names.filter(lambda name: not is_secret(name)), _tempting | _text, max_size=3)
)
def test_what_a_person_types_gives_the_program_exactly_its_words_and_variables(
    words: list[str], env: dict[str, str]
) -> None:
    seen = run_in_sh(render_command(Command(argv=(*_REPORTER, *words), env=env)))
    assert seen.argv == [with_home(word) for word in words]
    assert {name: value for name, value in seen.env.items() if name.startswith("V_")} == {
        name: with_home(value) for name, value in env.items()
    }


@given(name=_tempting.filter(lambda name: name not in {"", "~"} and "/" not in name))
def test_the_directory_may_have_any_name(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    directory = tmp_path_factory.mktemp("cwd") / name
    directory.mkdir()
    seen = run_in_sh(render_command(Command(argv=_REPORTER, cwd=str(directory), path_first=str(directory))))
    assert seen.cwd == str(directory)
    assert seen.env["PATH"] == f"{directory}:/usr/bin:/bin"


def test_a_directory_in_the_home_directory_is_the_home_of_who_types_it(tmp_path: Path) -> None:
    (tmp_path / "my work").mkdir()
    command = Command(argv=_REPORTER, cwd="~/my work", path_first="~/env/bin")
    seen = run_in_sh(render_command(command), HOME=str(tmp_path))
    assert seen.cwd == str(tmp_path / "my work")
    assert seen.env["PATH"].split(":")[0] == f"{tmp_path}/env/bin"


def test_a_directory_that_is_not_there_ends_it_before_the_program_runs() -> None:
    text = render_command(Command(argv=("echo", "ran"), cwd="/nowhere/at/all", env={"A": "1"}))
    done = subprocess.run(["/bin/sh"], input=text, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode != 0
    assert done.stdout == ""


def test_variables_are_unset_and_a_prefix_is_told_but_left_to_the_person() -> None:
    text = render_command(Command(argv=_REPORTER, unset=("RANK", "PET_*"), env={"V_A": "1"}))
    seen = run_in_sh(text, RANK="3", PET_NNODES="2")
    assert "RANK" not in seen.env
    assert seen.env["V_A"] == "1"
    assert text.startswith("# not set in the job's environment: PET_*\n")


def test_a_secret_is_never_shown_and_its_name_is() -> None:
    text = render_command(Command(argv=("true",), env={"HF_TOKEN": "s3cret", "V": "plain"}))
    assert "s3cret" not in text
    assert f"HF_TOKEN='{REDACTED}'" in text
    assert "V=plain" in text


def test_the_text_is_laid_out_for_reading() -> None:
    command = Command(
        argv=("/env/bin/python", "train.py", "two words"),
        env={"NNODES": "2"},
        unset=("RANK", "PET_*"),
        path_first="/env/bin",
        cwd="~/work",
    )
    assert render_command(command).splitlines() == [
        "# not set in the job's environment: PET_*",
        'cd "$HOME"/work &&',
        "env -u RANK \\",
        '  PATH=/env/bin:"$PATH" \\',
        "  NNODES=2 \\",
        "  /env/bin/python train.py 'two words'",
    ]


@pytest.mark.parametrize(
    ("path", "quoted"),
    [
        ("~", '"$HOME"'),
        ("~/", '"$HOME"/'),
        ("~/a b", "\"$HOME\"/'a b'"),
        ("~root/x", "'~root/x'"),
        ("a~/b", "'a~/b'"),
        ("", "''"),
    ],
)
def test_only_ones_own_home_is_left_to_the_shell(path: str, quoted: str) -> None:
    assert quote_path(path) == quoted


def test_a_prelude_runs_first_and_what_is_asked_for_is_set_after_it() -> None:
    command = Command(
        argv=_REPORTER,
        env={"V_MINE": "asked"},
        unset=("V_STRAY",),
        path_first="/first",
        cwd="/",
        prelude="export V_MINE=p V_YOURS=p V_STRAY=p PATH=/theirs:$PATH # why",
    )
    seen = run_in_sh(render_command(command))
    assert (seen.env["V_MINE"], seen.env["V_YOURS"], seen.cwd) == ("asked", "p", "/")
    assert "V_STRAY" not in seen.env
    assert seen.env["PATH"].startswith("/first:/theirs:")


def test_a_job_does_not_start_after_a_prelude_that_failed() -> None:
    text = render_command(Command(argv=("echo", "started"), prelude="true; false"))
    done = subprocess.run(["/bin/sh"], input=text.encode(), capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


STEP = "srun --jobid=42 --overlap --nodelist=n1 --nodes=1 --ntasks=1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("see: ssh n1 iostat -x 1 5; then go on", f"see: {STEP} iostat -x 1 5; then go on"),
        ("its log: ssh n1 'dmesg -T | tail'", f"its log: {STEP} sh -c 'dmesg -T | tail'"),
        ("ssh n11 top, ssh n2 top", "ssh n11 top, ssh n2 top"),
        ("no sshd, no ssh n1", "no sshd, no ssh n1"),
    ],
)
def test_a_command_for_a_node_is_a_step_where_slurm_reaches_it(text: str, said: str) -> None:
    nodes = [Node(name="n1", slurm_job=42), Node(name="n2")]
    assert as_steps(text, nodes) == said
    assert as_steps(text, [Node(name="n1"), Node(name="n2")]) == text
