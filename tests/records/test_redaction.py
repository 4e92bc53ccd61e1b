from __future__ import annotations

import msgspec

from multinode.cluster.quoting import Command, render_command, shown_environment
from multinode.records.plan import LaunchPlan, NodePlan, PlanFile, redact_plan
from multinode.secret_values import FORWARDED, REDACTED

ENV = {"WANDB_API_KEY": "s3cret", "HF_TOKEN": "s3cret", "db_password": "s3cret", "NCCL_DEBUG": "INFO"}


def test_a_stored_plan_holds_no_secret_and_everything_else() -> None:
    node = NodePlan(
        node="a",
        node_rank=0,
        ranks=(0,),
        addr=None,
        ifname=None,
        run_dir="/r",
        command=Command(argv=("true", "--hub_token", "s3cret"), env=ENV, cwd="/work", prelude="export HF_TOKEN=s3cret"),
        files=(PlanFile(path="job.yaml", text="hub_token: s3cret\nlr: 1\n"),),
    )
    plan = LaunchPlan(
        run_id="r",
        engine="torchrun",
        job="j",
        master_addr="::1",
        master_port=1,
        nproc_per_node=1,
        world_size=1,
        nodes=(node,),
    )
    redacted = redact_plan(plan)
    assert b"s3cret" not in msgspec.json.encode(redacted)
    command = redacted.nodes[0].command
    assert command.env == dict.fromkeys(("WANDB_API_KEY", "HF_TOKEN", "db_password"), REDACTED) | {"NCCL_DEBUG": "INFO"}
    assert (command.argv, command.cwd) == (("true", "--hub_token", REDACTED), "/work")
    assert command.prelude == f"export HF_TOKEN='{REDACTED}'"
    assert redacted.nodes[0].files == (PlanFile(path="job.yaml", text=f'hub_token: "{REDACTED}"\nlr: 1\n'),)
    assert plan.nodes[0].command.env == ENV


def test_a_forwarded_value_is_never_shown_whatever_its_name() -> None:
    command = Command(argv=("true",), env={"SITE": "s3cret", "HF_TOKEN": "s3cret", "A": "b"}, forwarded=("SITE",))
    assert shown_environment(command) == {"SITE": FORWARDED, "HF_TOKEN": REDACTED, "A": "b"}
    assert "s3cret" not in render_command(command)
    assert "SITE='<forwarded>'" in render_command(command)
