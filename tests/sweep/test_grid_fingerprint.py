from __future__ import annotations

from typing import Any

import msgspec
import pytest

from multinode.cluster.cluster import Cluster
from multinode.cluster.hostfile import parse_hostfile
from multinode.job.code_tree import CodeTree
from multinode.job.engines.engine import Engine
from multinode.job.job import Job, JobEnvironment, ScriptJob, override_job, parse_training
from multinode.job.launch_options import LaunchOptions
from multinode.series.grid import Grid, fingerprint
from tests.levers.compressed import compressed

JOB = parse_training("model_name_or_path: m\nstage: sft\n", "job.yaml")
HOSTS = "a slots=2 price=1 env.NCCL_ALGO=Ring env.HF_TOKEN=one\nb slots=2\n"
OPTIONS = LaunchOptions(environment=JobEnvironment(env={"X": "1"}))
STEPS: dict[str, Any] = {"steps": 30}


def print_of(
    job: Job = JOB, hosts: str = HOSTS, options: LaunchOptions = OPTIONS, measured: dict[str, Any] | None = None
) -> str:
    cluster: Cluster = parse_hostfile(hosts, "hosts")
    return fingerprint({"cell": job}, cluster.nodes, options, STEPS if measured is None else measured)


def options_with(env: dict[str, str], **changed: Any) -> LaunchOptions:
    return msgspec.structs.replace(OPTIONS, environment=JobEnvironment(env=env), **changed)


def test_the_same_command_has_the_same_fingerprint_and_it_shows_nothing() -> None:
    assert print_of() == print_of()
    assert len(print_of()) == 32
    assert set(print_of()) <= set("0123456789abcdef")


@pytest.mark.parametrize(
    "hosts",
    [
        HOSTS.replace("price=1", "price=2"),
        HOSTS.replace("a slots", "a port=2222 slots"),
        HOSTS.replace("env.HF_TOKEN=one", "env.HF_TOKEN=two"),
        HOSTS.replace("a slots", "a user=me key=~/.ssh/other jump=gate ssh_config=conf slurm_job=7 slots"),
    ],
)
def test_what_changes_no_figure_changes_no_fingerprint(hosts: str) -> None:
    assert print_of(hosts=hosts) == print_of()


def test_keys_that_are_no_texts_count_as_others_do() -> None:
    """As those of `max_memory`, in the YAML or as values of an axis."""
    prints = {print_of(override_job(JOB, {"max_memory": {key: "20GiB"}})) for key in (0, 1, "0", None, True)}
    assert len(prints) == 5
    axis = Grid(settings={"max_memory": ({0: "20GiB"}, {0: "10GiB"})}, nodes=(1,))
    other = Grid(settings={"max_memory": ({0: "20GiB"}, {1: "10GiB"})}, nodes=(1,))
    assert print_of(measured={"grid": axis}) != print_of(measured={"grid": other})


def test_where_the_file_of_the_job_lies_does_not_matter() -> None:
    assert print_of(msgspec.structs.replace(JOB, config_path="/far/away/job.yaml")) == print_of()


@pytest.mark.parametrize(
    "other",
    [
        print_of(override_job(JOB, {"cutoff_len": 1})),
        print_of(msgspec.structs.replace(JOB, text=JOB.text + "num_train_epochs: 2\n")),
        print_of(msgspec.structs.replace(JOB, deepspeed_text="{}")),
        print_of(ScriptJob(argv=("train.py",))),
        print_of(hosts=HOSTS.replace("b slots=2", "c slots=2")),
        print_of(hosts=HOSTS.replace("b slots=2", "b slots=1")),
        print_of(hosts=HOSTS.replace("b slots=2", "b gpus=0,1")),
        print_of(hosts=HOSTS.replace("Ring", "Tree")),
        print_of(hosts=HOSTS.replace("b slots", "b addr=192.0.2.7 slots")),
        print_of(hosts=HOSTS.replace("b slots", "b ifname=eth1 slots")),
        print_of(hosts=HOSTS.replace("b slots", "b python=/other/bin/python slots")),
        print_of(hosts=HOSTS.replace("b slots", "b workdir=/elsewhere slots")),
        print_of(options=options_with({"X": "2"})),
        print_of(options=options_with({"X": "1"}, levers=compressed("fp16"))),
        print_of(options=options_with({"X": "1"}, engine=Engine(name="accelerate"))),
        print_of(options=options_with({"X": "1"}, code=CodeTree(source="/src"))),
        print_of(measured={"steps": 60}),
    ],
)
def test_whatever_decides_the_figures_changes_it(other: str) -> None:
    assert other != print_of()
