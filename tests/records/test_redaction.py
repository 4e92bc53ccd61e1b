from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from multinode.cluster.quoting import Command, render_command, shown_environment
from multinode.records.plan import LaunchPlan, PlanFile, has_secret
from multinode.secret_values import FORWARDED, REDACTED
from tests import make

ENV = {"WANDB_API_KEY": "s3cret", "HF_TOKEN": "s3cret", "db_password": "s3cret", "NCCL_DEBUG": "INFO"}


def test_a_stored_plan_holds_no_secret_and_everything_else(tmp_path: Path) -> None:
    node = make.node_plan(
        command=Command(
            argv=("true", "--hub_token", "s3cret"),
            env=ENV | {"SITE": "s3cret"},
            cwd="/work",
            forwarded=("SITE",),
            prelude="export HF_TOKEN=s3cret",
        ),
        files=(PlanFile(path="job.yaml", text="hub_token: >-\n  s3cret\nlr: 1\n", in_memory=True),),
    )
    plan = make.plan(node)
    directory = make.store(tmp_path, plan=plan)
    assert b"s3cret" not in (directory.path / "plan.json").read_bytes()
    stored = directory.read("plan.json", LaunchPlan)
    assert stored is not None
    hidden = dict.fromkeys(("WANDB_API_KEY", "HF_TOKEN", "db_password"), REDACTED)
    shown = msgspec.structs.replace(
        node.command,
        argv=("true", "--hub_token", REDACTED),
        env=hidden | {"NCCL_DEBUG": "INFO", "SITE": FORWARDED},
        prelude=f"export HF_TOKEN='{REDACTED}'",
    )
    file = PlanFile(path="job.yaml", text=f"hub_token: {REDACTED}\nlr: 1\n", in_memory=True)
    assert stored == msgspec.structs.replace(plan, nodes=(msgspec.structs.replace(node, command=shown, files=(file,)),))
    assert has_secret(node)
    assert plan.nodes[0].command.env["SITE"] == "s3cret"


@pytest.mark.parametrize(
    "command",
    [
        Command(argv=("true", "--hub_token", "s3cret")),
        Command(argv=("true",), env={"HF_TOKEN": "s3cret"}),
        Command(argv=("true",), env={"SITE": "s3cret"}, forwarded=("SITE",)),
        Command(argv=("true",), prelude="export HF_TOKEN=s3cret"),
    ],
)
def test_a_node_hears_a_secret_in_any_part_of_its_command(command: Command) -> None:
    assert has_secret(make.node_plan(command=command))
    harmless = Command(argv=("true", "--lr", "1"), env={"NCCL_DEBUG": "INFO"}, unset=("RANK",))
    assert not has_secret(make.node_plan(command=harmless))


def test_a_forwarded_value_is_never_shown_whatever_its_name() -> None:
    command = Command(argv=("true",), env={"SITE": "s3cret", "HF_TOKEN": "s3cret", "A": "b"}, forwarded=("SITE",))
    assert shown_environment(command) == {"SITE": FORWARDED, "HF_TOKEN": REDACTED, "A": "b"}
    assert "s3cret" not in render_command(command)
    assert "SITE='<forwarded>'" in render_command(command)
