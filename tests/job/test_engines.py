from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from multinode.cluster.dataplane import Endpoint
from multinode.cluster.quoting import Command
from multinode.job.engines import ENGINES
from multinode.job.engines.accelerate import parse_accelerate
from multinode.job.engines.engine import Engine, choose_engine
from multinode.job.engines.llamafactory import reads_rank
from multinode.job.engines.place import STRAY_VARIABLES
from multinode.job.engines.torchrun import benchmark_command
from multinode.job.job import Form, Job, ScriptJob, TrainingJob
from multinode.node.hang.diagnose import list_flight_records
from multinode.records.benchmark import CollectiveTest, Message
from multinode.records.plan import Place, Rendezvous
from multinode.strict_yaml import parse_yaml
from tests.golden import Golden, error_of

MEETING = Rendezvous(addr="10.0.0.1", port=29500, workers=(4, 4))
PLACE = Place(
    node="b",
    node_rank=1,
    ranks=(4, 5, 6, 7),
    endpoint=Endpoint(addr=None, ifname="ens1f0"),
    devices=("1", "6"),
    run_dir="/home/u/.multinode/runs/r.1",
    python="/env/bin/python",
    packages={"llamafactory": "0.9.5"},
)
FIRST = msgspec.structs.replace(PLACE, node_rank=0)
SCRIPT = ScriptJob(argv=("train.py", "two words", "$HOME", "--x=;rm", ""))
YAML = TrainingJob(config_path="sft.yaml", text="", config={})
BARE = msgspec.structs.replace(PLACE, endpoint=Endpoint(addr=None, ifname=None), devices=None, python=None, packages={})


def run(name: str, place: Place, env: dict[str, str] | None = None, meeting: Rendezvous = MEETING) -> Command:
    job = YAML if name == "llamafactory" else ScriptJob(argv=("train.py",))
    return Engine(name=name).command(meeting, place, job, env or {})


def at(place: Place = PLACE, **endpoint: Any) -> Place:
    """The place with another address or interface."""
    return msgspec.structs.replace(place, endpoint=msgspec.structs.replace(place.endpoint, **endpoint))


def among(*workers: int, place: Place = PLACE) -> tuple[Rendezvous, Place]:
    """The place among nodes with so many workers each."""
    meeting = msgspec.structs.replace(MEETING, workers=workers)
    return meeting, msgspec.structs.replace(place, ranks=meeting.ranks(place.node_rank))


def test_nccl_gets_the_interface_as_an_exact_match_gloo_its_plain_name_and_what_is_not_known_is_not_set() -> None:
    env = run("torchrun", PLACE).env
    assert (env["NCCL_SOCKET_IFNAME"], env["GLOO_SOCKET_IFNAME"]) == ("=ens1f0", "ens1f0")
    assert not {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES"} & set(run("torchrun", BARE).env)


def test_of_what_the_hostfile_names_several_nccl_gets_the_list_and_who_knows_no_lists_the_first() -> None:
    rails = msgspec.structs.replace(at(ifnames=("ens1f0", "ens1f1")), hcas=("mlx5_0:1", "mlx5_1"))
    env = run("torchrun", rails).env
    assert (env["NCCL_SOCKET_IFNAME"], env["GLOO_SOCKET_IFNAME"]) == ("=ens1f0,ens1f1", "ens1f0")
    assert env["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1"
    assert "NCCL_IB_GID_INDEX" not in env
    assert run("torchrun", rails, env={"NCCL_IB_GID_INDEX": "3"}).env["NCCL_IB_GID_INDEX"] == "3"
    assert "NCCL_IB_HCA" not in run("torchrun", PLACE).env
    intel = run("torchrun", msgspec.structs.replace(rails, hcas=(), accelerator="xpu")).env
    assert (intel["CCL_KVS_IFACE"], intel["FI_TCP_IFACE"]) == ("ens1f0", "ens1f0")


def test_torchs_flight_recorder_writes_where_a_diagnosis_looks(tmp_path: Path) -> None:
    env = run("torchrun", msgspec.structs.replace(PLACE, run_dir=str(tmp_path))).env
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        # torch adds the rank.
        dump = Path(f"{env[name]}3")
        dump.write_bytes(b"123")
        assert list_flight_records(str(tmp_path), []) == [{"path": str(dump), "size_bytes": 3}]


def test_an_ipv6_data_plane_is_named_to_nccl_and_its_rendezvous_stands_in_brackets() -> None:
    command = run("torchrun", at(addr="fd00::2"), meeting=msgspec.structs.replace(MEETING, addr="fd00::1"))
    assert (command.env["NCCL_SOCKET_FAMILY"], command.env["MASTER_ADDR"]) == ("AF_INET6", "fd00::1")
    assert {"--master-addr=[fd00::1]", "--master-port=29500"} <= set(command.argv)
    assert "NCCL_SOCKET_FAMILY" not in run("torchrun", at(addr="10.0.0.2")).env


@pytest.mark.parametrize("place", [PLACE, BARE])
def test_nothing_left_over_in_a_profile_changes_the_run(place: Place) -> None:
    meeting, place = among(2, 2, place=place)
    commands = [
        benchmark_command(meeting, place, CollectiveTest(messages=(Message(size_bytes=8),)), None, {}),
        *(run(name, place, meeting=meeting) for name in ENGINES),
    ]
    for command in commands:
        removed_or_set = {*command.unset, *command.env}
        assert set(STRAY_VARIABLES) <= removed_or_set
        assert not set(command.unset) & set(command.env)


def test_llamafactory_is_forced_through_torchrun_with_one_worker_too() -> None:
    meeting, one = among(1, 1, place=msgspec.structs.replace(PLACE, devices=("6",)))
    env = run("llamafactory", one, meeting=meeting).env
    assert env["FORCE_TORCHRUN"] == "1"
    assert (env["NNODES"], env["NODE_RANK"], env["NPROC_PER_NODE"]) == ("2", "1", "1")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("10.0.0.1", "29500")


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.8.3", True),
        ("0.9.0", True),
        ("0.9.1", False),
        ("0.9.10", False),
        ("0.9.5.dev0", False),
        ("1.0.0", False),
        (None, True),
        ("main", True),
    ],
)
def test_rank_is_set_for_releases_that_read_it_and_for_unknown_ones(version: str | None, *, expected: bool) -> None:
    assert reads_rank(version) is expected
    packages = {"llamafactory": version} if version is not None else {}
    command = run("llamafactory", msgspec.structs.replace(PLACE, packages=packages))
    assert ("RANK" in command.env) is expected
    assert ("RANK" in command.unset) is not expected


def test_llamafactory_reads_the_job_that_travelled_and_finds_its_own_torchrun() -> None:
    command = run("llamafactory", PLACE)
    assert command.argv == ("llamafactory-cli", "train", "/home/u/.multinode/runs/r.1/job.yaml")
    assert command.path_first == "/env/bin"
    assert run("llamafactory", BARE).path_first is None
    assert run("llamafactory", msgspec.structs.replace(PLACE, python="python3")).path_first is None


def test_each_run_has_a_port_of_its_own_for_nccls_ras() -> None:
    places = [msgspec.structs.replace(PLACE, run_dir=f"/home/u/.multinode/runs/r.{rank}") for rank in range(20)]
    addresses = {run("torchrun", place).env["NCCL_RAS_ADDR"] for place in places}
    assert len(addresses) == len(places)
    assert all(host == "127.0.0.1" and 12000 <= int(port) < 20000 for host, port in (a.split(":") for a in addresses))
    assert "NCCL_RAS_ADDR" not in run("torchrun", BARE).env


def test_torchrun_is_started_by_the_interpreter_in_full() -> None:
    assert run("torchrun", PLACE).argv[:3] == ("/env/bin/python", "-m", "torch.distributed.run")
    assert run("torchrun", BARE).argv[0] == "python3"


def test_the_master_port_and_address_are_numbers_of_this_place() -> None:
    argv = run("torchrun", PLACE, meeting=msgspec.structs.replace(MEETING, port=1234)).argv
    assert "--master-port=1234" in argv
    assert any(re.fullmatch(r"--master-addr=[0-9.]+", word) for word in argv)


def test_a_collective_test_runs_the_archive_with_its_request_as_data() -> None:
    test = CollectiveTest(messages=(Message(size_bytes=8), Message(size_bytes=16)), backend="gloo")
    command = benchmark_command(MEETING, PLACE, test, "/home/u/.multinode/agent/x.pyz", {"MINE": "1"})
    assert command.argv[-2:] == ("/home/u/.multinode/agent/x.pyz", "collectives")
    assert command.env["MINE"] == "1"
    request = json.loads(command.env["MULTINODE_REQUEST"])
    assert [message["size_bytes"] for message in request["messages"]] == [8, 16]


def world(meeting: Rendezvous, place: Place, env: dict[str, str]) -> dict[str, Any]:
    option = next(word for word in run("deepspeed", place, env, meeting).argv if "--world_info=" in word)
    info: dict[str, Any] = json.loads(base64.urlsafe_b64decode(option.partition("=")[2]))
    return info


@pytest.mark.parametrize("name", [name for name in ENGINES if name not in {"llamafactory", "serve"}])
def test_every_engine_keeps_a_scripts_arguments_untouched_and_the_users_variables(name: str) -> None:
    command = Engine(name=name).command(*among(2, 2), SCRIPT, {"MASTER_PORT": "1", "MINE": "x"})
    assert command.argv[-5:] == SCRIPT.argv
    assert {"MASTER_PORT": "1", "MINE": "x"}.items() <= command.env.items()
    assert command.path_first == "/env/bin"


@pytest.mark.parametrize("name", ["torchrun", "deepspeed", "accelerate"])
def test_the_other_engines_start_llamafactorys_workers_as_a_module(name: str) -> None:
    argv = Engine(name=name).command(*among(2, 2), YAML, {}).argv
    assert argv[-3:] == ("--module", "llamafactory.launcher", "/home/u/.multinode/runs/r.1/job.yaml")
    assert ("--no_local_rank" in argv) is (name == "deepspeed")


def test_deepspeed_counts_the_workers_of_all_nodes_and_takes_this_nodes_gpus() -> None:
    meeting, place = among(2, 2, 2)
    found = world(meeting, place, {})
    assert {name: len(ids) for name, ids in found.items()} == {"node-0": 2, "node-1": 2, "node-2": 2}
    # The launcher looks its own node up by its place.
    assert list(found) == ["node-0", "node-1", "node-2"]
    assert found["node-1"] == ["1", "6"]
    assert world(meeting, msgspec.structs.replace(place, devices=None), {})["node-1"] == [0, 1]


def test_deepspeed_keeps_devices_that_the_user_has_chosen() -> None:
    assert world(*among(2, 2), {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b,GPU-c"})["node-1"] == ["GPU-a", "GPU-b"]


def placed(base: dict[str, Any]) -> dict[str, Any]:
    (file,) = Engine(name="accelerate", accelerate=base).files(MEETING, PLACE)
    assert f"{PLACE.run_dir}/{file.path}" in Engine(name="accelerate").command(MEETING, PLACE, SCRIPT, {}).argv
    config: dict[str, Any] = parse_yaml(file.text)
    return config


def test_accelerate_is_told_the_total_of_workers_and_a_static_rendezvous() -> None:
    config = placed({})
    assert (config["num_machines"], config["machine_rank"], config["num_processes"]) == (2, 1, 8)
    assert (config["main_process_ip"], config["main_process_port"]) == ("10.0.0.1", 29500)
    assert (config["rdzv_backend"], config["same_network"]) == ("static", True)


def test_what_places_a_node_is_set_anew_and_the_rest_stays_the_users() -> None:
    theirs = {
        "num_processes": 64,
        "machine_rank": 7,
        "gpu_ids": "3",
        "mixed_precision": "fp16",
        "fsdp_config": {"a": 1},
    }
    config = placed(theirs | {"distributed_type": "FSDP"})
    assert (config["num_processes"], config["machine_rank"], config["gpu_ids"]) == (8, 1, "all")
    assert (config["mixed_precision"], config["fsdp_config"]) == ("fp16", {"a": 1})
    assert config["distributed_type"] == "FSDP"


@pytest.mark.parametrize("kind", ["NO", "MULTI_CPU", "MULTI_GPU", None])
def test_accelerate_starts_all_workers_itself_on_cpus_too(kind: str | None) -> None:
    assert placed({"distributed_type": kind} if kind else {})["distributed_type"] == "MULTI_GPU"
    engine = Engine(name="accelerate", accelerate={"use_cpu": True})
    assert engine.command(MEETING, PLACE, SCRIPT, {}).env["ACCELERATE_USE_CPU"] == "true"
    assert "ACCELERATE_USE_CPU" not in Engine(name="accelerate").command(MEETING, PLACE, SCRIPT, {}).env


def test_accelerate_does_not_start_deepspeed_through_pdsh() -> None:
    config = placed({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}})
    assert config["deepspeed_config"] == {"zero_stage": 2, "deepspeed_multinode_launcher": "standard"}


def test_accelerates_configuration_is_read_as_yaml() -> None:
    assert parse_accelerate("use_cpu: true\n", "a.yaml") == {"use_cpu": True}


def test_only_accelerate_has_a_file_of_its_own() -> None:
    assert [name for name in ENGINES if Engine(name=name).files(MEETING, PLACE)] == ["accelerate"]
    assert [file.path for file in Engine(name="accelerate").files(MEETING, PLACE)] == ["accelerate.yaml"]


def test_an_engine_says_what_it_does() -> None:
    torchrun, deepspeed, accelerate, program = (
        Engine(name=name).kind for name in ("torchrun", "deepspeed", "accelerate", "exec")
    )
    assert (torchrun.starts_workers, program.starts_workers) == (True, False)
    assert (torchrun.sharded_by, deepspeed.sharded_by) == (None, "DeepSpeed")
    assert (torchrun.takes_configuration, accelerate.takes_configuration) == (False, True)


def test_a_command_knows_its_nodes_place_and_no_workers() -> None:
    command = Engine(name="exec").command(MEETING, PLACE, ScriptJob(argv=("./run.sh", "a b")), {})
    assert command.argv == ("./run.sh", "a b")
    assert (command.env["NNODES"], command.env["NODE_RANK"], command.env["NPROC_PER_NODE"]) == ("2", "1", "4")
    assert {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"} <= set(command.unset)


@pytest.mark.parametrize(
    ("argv", "form", "ports"),
    [
        (("vllm", "serve", "m"), "executable", (8000, None)),
        (("vllm", "serve", "m", "--port", "1", "--port=2"), "executable", (2, None)),
        (("sglang.launch_server", "--port", "x"), "module", (30000, None)),
        (("vllm", "bench", "serve"), "executable", (None, None)),
    ],
)
def test_a_server_answers_on_the_first_node(argv: tuple[str, ...], form: Form, ports: tuple[int | None, ...]) -> None:
    kind, job = Engine(name="serve").kind, ScriptJob(argv=argv, form=form)
    assert (kind.serves(FIRST, job), kind.serves(PLACE, job)) == ports


def test_a_server_on_one_node_has_no_place() -> None:
    job = ScriptJob(argv=("vllm", "serve", "m"), form="executable")
    assert Engine(name="serve").command(*among(2, place=FIRST), job, {}).argv == job.argv


@pytest.mark.parametrize(
    ("job", "asked", "expected"),
    [
        (YAML, None, "llamafactory"),
        (SCRIPT, None, "torchrun"),
        (YAML, "deepspeed", "deepspeed"),
        (YAML, "torchrun", "torchrun"),
        (SCRIPT, "accelerate", "accelerate"),
        (SCRIPT, "exec", "exec"),
    ],
)
def test_a_job_has_an_engine_of_its_own_and_runs_under_others(job: Job, asked: str | None, expected: str) -> None:
    assert choose_engine(job, asked).name == expected


def test_what_does_not_fit_an_engine_is_refused_with_what_does(golden: Golden) -> None:
    chosen: dict[str, tuple[Job, str | None, dict[str, Any] | None]] = {
        "llamafactory, a script": (SCRIPT, "llamafactory", None),
        "exec, a YAML": (YAML, "exec", None),
        "serve, a YAML": (YAML, "serve", None),
        "serve, a script": (SCRIPT, "serve", None),
        "mpi": (SCRIPT, "mpi", None),
        "torchrun, accelerate's configuration": (SCRIPT, None, {}),
        "deepspeed, accelerate's configuration": (SCRIPT, "deepspeed", {"use_cpu": True}),
    }
    read = ("- a\n", "compute_environment: AMAZON_SAGEMAKER\n")
    golden.check_errors(
        "refused_engines",
        {case: error_of(choose_engine, *words) for case, words in chosen.items()}
        | {text.strip(): error_of(parse_accelerate, text, "a.yaml") for text in read}
        | {"fewer devices than workers": error_of(world, *among(2, 2), {"CUDA_VISIBLE_DEVICES": "3"})},
    )
