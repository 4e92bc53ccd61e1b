from __future__ import annotations

import re

import msgspec
import pytest

from multinode.check.check import CHECK_NAMES, CheckedNode, CheckReport, list_rules
from multinode.check.rule import CheckFinding
from multinode.check.screen import next_step, show
from multinode.render.blocks import blocks_html
from multinode.render.sheet import NextCommand, blocks_markdown
from tests.check.inspecting import command_in_words
from tests.golden import Golden, screen_of

CLOCK = CheckFinding(
    severity="warning",
    node="node1",
    code="machine",
    message="its clock is 12.3 s behind node0's: times in logs are not comparable",
    hint="on node1:\nsudo timedatectl set-ntp true",
)
FINDINGS = (
    CheckFinding(
        severity="error",
        node="node0",
        code="master-port",
        message="port 29500, the rendezvous port, is in use by python3 (pid 7, user eve): the workers could "
        "not connect",
        hint="end this process, or choose another port: --master-port 29501",
    ),
    CLOCK,
    CheckFinding(severity="warning", node=None, code="link", message="[red]no[/] stream fills the links\x1b[2J"),
    CheckFinding(severity="note", node="node0", code="gpus", message="nvidia-smi took 3.0 s", hint="nvidia-smi -pm 1"),
    CheckFinding(severity="note", node="node1", code="hostname", message="its name is 127.0.1.1", by_hand=True),
)
MISSING = tuple(
    CheckFinding(
        severity="error",
        node=node,
        code="paths",
        message="data is missing: the job reads it on every node",
        hint="copy it; run in this directory:\n"
        f"ssh -F /run/multinode/lab/ssh_config {node} mkdir -p /home/user/x && scp -rp data {node}:/home/user/x/",
    )
    for node in ("node0", "node1")
)
TWO = (("node0", True), ("node1", True))


def report_of(nodes: tuple[tuple[str, bool], ...], *findings: CheckFinding) -> CheckReport:
    checked = tuple(
        CheckedNode(name=name, node_rank=rank, reached=reached) for rank, (name, reached) in enumerate(nodes)
    )
    return CheckReport(ok=not findings, nodes=checked, findings=findings, time_s=1.0)


@pytest.mark.parametrize(
    ("name", "nodes", "findings", "details"),
    [
        ("check_ok", TWO, (), False),
        ("check_findings", TWO, FINDINGS, False),
        ("check_alike", TWO, (*MISSING, CLOCK), False),
        ("check_details", TWO, FINDINGS, True),
        ("check_unreached", (("node0", True), ("node1", False)), (CLOCK,), False),
        ("check_many", tuple((f"node{number}", number != 3) for number in range(64)), (CLOCK,), False),
        ("check_many_details", tuple((f"node{number}", number != 3) for number in range(9)), (CLOCK,), True),
    ],
)
def test_the_screen(
    golden: Golden, name: str, nodes: tuple[tuple[str, bool], ...], findings: tuple[CheckFinding, ...], *, details: bool
) -> None:
    golden.check_answer(name, show(report_of(nodes, *findings)), details=details, most_lines=None if details else 22)


def test_what_a_launch_by_hand_alone_would_meet_does_not_count_as_failed() -> None:
    (note,) = FINDINGS[4:]
    text = screen_of(show(report_of(TWO, note)))
    assert text.startswith("OK: no errors or warnings (")
    assert "127.0.1.1" not in text
    assert f"all {len(CHECK_NAMES)} checks (node0 and node1)" in text


def test_every_fix_is_copied_whole_from_a_terminal_of_80_columns() -> None:
    rules = list_rules()
    hints = [re.sub(r"{(\w+)(?:!s)?}", r"a-\1-of-some-length", rule.hint) for rule in rules]
    assert [found for hint in hints if (found := command_in_words(hint))] == []
    findings = [
        CheckFinding(severity="error", node="node1", code=rule.code, message=str(number), hint=hint)
        for number, (rule, hint) in enumerate(zip(rules, hints, strict=True))
    ]
    lines = screen_of(show(report_of(TWO, *findings)), 80).splitlines()
    commands = {line for hint in hints for line in hint.split("\n")[1:]}
    assert len(commands) > len(rules) / 3
    assert not commands - {line.strip() for line in lines}


def test_equal_commands_of_several_nodes_stand_below_where_each_runs() -> None:
    both = [msgspec.structs.replace(CLOCK, node=node, hint=f"on {node}:\nsudo x") for node in ("a", "b")]
    text = screen_of(show(report_of(TWO, *both)))
    assert [line.strip() for line in text.splitlines() if line.strip().startswith(("fix", "sudo"))] == [
        "fix: on a:",
        "sudo x",
        "fix: on b:",
        "sudo x",
    ]


def test_a_page_and_markdown_have_the_whole_report_with_the_marks_of_the_terminal(golden: Golden) -> None:
    blocks = list(show(report_of(TWO, *FINDINGS)))
    golden.check("check_findings.html", blocks_html(blocks) + "\n")
    golden.check("check_findings.md", blocks_markdown(blocks))


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ((), "multinode launch --hosts h train.yaml"),
        ((CLOCK,), "fix the 1 warning above, then: multinode check --hosts h --strict train.yaml"),
        (
            (FINDINGS[0], *MISSING, CLOCK),
            "fix the 2 errors and 1 warning above, then: multinode check --hosts h --strict train.yaml",
        ),
    ],
)
def test_the_next_command_has_the_options_that_were_given(failures: tuple[CheckFinding, ...], expected: str) -> None:
    step = next_step(failures, " --hosts h --strict train.yaml", "multinode launch --hosts h train.yaml")
    assert step == NextCommand("Next", expected)
