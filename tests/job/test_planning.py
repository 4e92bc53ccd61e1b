from __future__ import annotations

import base64
import json
import shlex
from typing import Any

import msgspec
import pytest

from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.dataplane import Endpoint
from multinode.cluster.facts import UNASKED, Gpu, Interface, NodeFacts, PortFact, RdmaPort, Route
from multinode.errors import MultinodeError
from multinode.job.code_tree import CodeFile, CodeTree
from multinode.job.engines import ENGINES
from multinode.job.engines.engine import Engine
from multinode.job.job import Job, JobEnvironment, ScriptJob, TrainingJob
from multinode.job.launch_options import LaunchOptions
from multinode.job.plan_notes import route_notes
from multinode.job.planning import candidate_ports, choose_master_port, plan_launch, with_workers, workers_of_nodes
from multinode.job.synthetic import with_synthetic
from multinode.levers.averaging import Averaging
from multinode.levers.balance import Balance
from multinode.levers.levers import NONE, Levers
from multinode.records.benchmark import CollectiveTest, DeviceTest, Message
from multinode.records.plan import LaunchPlan, NodePlan, Observation, Rendezvous, TraceWindow
from multinode.stats.unknown import Entries, Unknown, or_empty
from tests import make
from tests.golden import Golden, error_of
from tests.levers.compressed import compressed

SFT = TrainingJob(
    config_path="configs/sft.yaml",
    text="model_name_or_path: /models/tiny\nstage: sft\nfinetuning_type: lora\n",
    config={"model_name_or_path": "/models/tiny", "stage": "sft", "finetuning_type": "lora"},
)
ZERO3 = msgspec.structs.replace(
    SFT, config=SFT.config | {"deepspeed": "configs/ds_z3.json"}, deepspeed_text='{"zero_optimization": {"stage": 3}}\n'
)
SYNTHETIC = with_synthetic(
    msgspec.structs.replace(ZERO3, config=ZERO3.config | {"dataset": "mine", "max_steps": 30, "cutoff_len": 8})
)
OWN = msgspec.structs.replace(
    ZERO3, config=ZERO3.config | {"dataset": "mine", "output_dir": "saves/x", "adapter_name_or_path": "./adapter"}
)
CODE = CodeTree(
    source="/home/me/project",
    cwd="src",
    files=tuple(
        CodeFile(path=path, digest="0" * 64, size_bytes=512)
        for path in ("src/data/dataset_info.json", "src/train.py", "README.md")
    ),
)
SCRIPT = ScriptJob(argv=("train.py", "--name", "two words", "--glob=*"))
TWO_4090 = make.cluster(
    Node(name="box1", gpus=(6, 7), slots=2, ifname="ens1f0", env={"WANDB_API_KEY": "k", "NCCL_DEBUG": "WARN"}),
    Node(name="box2", gpus=(1, 6), slots=2, addr="10.0.0.2"),
    source="hostfiles/two4090.txt",
)


VARIABLE = "MULTINODE_GRAD_COMPRESS"
CLUSTER = make.cluster(Node(name="a", addr="10.0.0.1"), Node(name="b", addr="10.0.0.2"))
BARE_SCRIPT = ScriptJob(argv=("train.py",))
BARE_SFT = TrainingJob(config_path="sft.yaml", text="", config={"model_name_or_path": "m", "stage": "sft"})


def plan(job: Job | CollectiveTest, **options: Any) -> LaunchPlan:
    return plan_launch(CLUSTER, job, {}, "r", LaunchOptions(**options))


def sft(**config: Any) -> TrainingJob:
    return msgspec.structs.replace(BARE_SFT, config=BARE_SFT.config | config)


def script(options: str) -> ScriptJob:
    return ScriptJob(argv=("train.py", *shlex.split(options)))


def traced(steps: int, *ranks: int) -> Observation:
    """A trace of these ranks; without any, as it is asked for."""
    return Observation(trace=TraceWindow(steps=steps, ranks=ranks))


def probed(name: str, address: str, llamafactory: str = "0.9.5") -> NodeFacts:
    return NodeFacts(
        node=name,
        home=f"/home/{name}",
        python=f"/home/{name}/env/bin/python",
        packages=Entries({"torch": "2.8.0", "llamafactory": llamafactory}),
        cwd=f"/home/{name}/work",
        interfaces=(
            Interface(name="lo", addresses=("127.0.0.1/8",), up=True, kind="loopback"),
            Interface(name="ens1f0", addresses=(f"{address}/24",), up=True, speed_gbit_per_s=25.0),
        ),
        gpus=tuple(Gpu(index=index, name="NVIDIA GeForce RTX 4090", uuid=f"GPU-{index}") for index in range(8)),
    )


FACTS = {"box1": probed("box1", "10.0.0.1"), "box2": probed("box2", "10.0.0.2", "0.9.0")}


VLLM = ScriptJob(argv=("vllm", "serve", "m", "--tensor-parallel-size", "16", "--port=9000"), form="executable")
SGLANG = ScriptJob(argv=("sglang.launch_server", "--model-path", "m", "--tp", "16"), form="module")
AROUND = JobEnvironment(
    env={"HF_TOKEN": "t", "NCCL_DEBUG": "TRACE"}, forwarded=("HF_TOKEN",), prelude="module load cuda"
)
COLLECTIVES = CollectiveTest(messages=(Message(size_bytes=8), Message(size_bytes=64)), backend="nccl")


@pytest.mark.parametrize(
    ("name", "job", "facts", "more"),
    [
        ("llamafactory", SFT, FACTS, {}),
        ("llamafactory-deepspeed", ZERO3, FACTS, {}),
        ("llamafactory-offline", SFT, {}, {}),
        ("llamafactory-synthetic", SYNTHETIC, FACTS, {}),
        ("llamafactory-code", OWN, FACTS, {"code": CODE}),
        ("torchrun", SCRIPT, FACTS, {}),
        ("torchrun-code-offline", SCRIPT, {}, {"code": msgspec.structs.replace(CODE, run_id="the-first")}),
        ("torchrun-offline", SCRIPT, {}, {}),
        ("torchrun-prelude", SCRIPT, FACTS, {"environment": AROUND}),
        ("deepspeed", SCRIPT, FACTS, {"engine": Engine(name="deepspeed")}),
        ("deepspeed-llamafactory", ZERO3, FACTS, {"engine": Engine(name="deepspeed")}),
        ("accelerate", SCRIPT, FACTS, {"engine": Engine(name="accelerate", accelerate={"mixed_precision": "bf16"})}),
        ("exec", SCRIPT, FACTS, {"engine": Engine(name="exec")}),
        ("vllm", VLLM, FACTS, {"engine": Engine(name="serve")}),
        ("sglang", SGLANG, FACTS, {"engine": Engine(name="serve")}),
        (
            "collective",
            CollectiveTest(messages=(Message(size_bytes=8), Message(size_bytes=64)), backend="nccl"),
            FACTS,
            {},
        ),
        ("devices", DeviceTest(kinds=("matmul",), dtypes=("bf16",), sizes=(4096,), turns=True), FACTS, {}),
    ],
)
def test_the_plan_is_the_golden_one(
    name: str, job: Job | CollectiveTest | DeviceTest, facts: dict[str, NodeFacts], more: dict[str, Any], golden: Golden
) -> None:
    options = LaunchOptions(agent=".multinode/agent/0123456789abcdef.pyz", **more)
    plan = plan_launch(TWO_4090, job, facts, "20260102-030405-abcd", options)
    golden.check(f"{name}.json", msgspec.json.format(msgspec.json.encode(plan), indent=2).decode() + "\n")


def test_a_plan_comes_back_from_its_file_as_it_was() -> None:
    plan = plan_launch(TWO_4090, SFT, FACTS, "r", LaunchOptions())
    assert msgspec.json.decode(msgspec.json.encode(plan), type=LaunchPlan) == plan


def test_planning_twice_gives_the_same_plan() -> None:
    assert plan_launch(TWO_4090, SCRIPT, FACTS, "r", LaunchOptions()) == plan_launch(
        TWO_4090, SCRIPT, FACTS, "r", LaunchOptions()
    )


def port_of(run_id: str, node: str = "", taken: tuple[int, ...] = (), asked: int | None = None) -> int:
    """The port of a run, where these of a node are taken."""
    ports = tuple(PortFact(port=port, taken=True, user="somebody") for port in taken)
    facts = {name: msgspec.structs.replace(found, ports=ports if name == node else ()) for name, found in FACTS.items()}
    return plan_launch(TWO_4090, SCRIPT, facts, run_id, LaunchOptions(master_port=asked)).rendezvous.port


def test_a_port_of_which_it_is_unknown_whether_it_is_taken_is_tried() -> None:
    port = choose_master_port("r", None, None)
    unsure = NodeFacts(ports=(PortFact(port=port, taken=Unknown("Permission denied")),))
    taken = NodeFacts(ports=(PortFact(port=port, taken=True),))
    assert choose_master_port("r", None, unsure) == port != choose_master_port("r", None, taken)


def test_each_run_meets_at_a_port_of_its_own() -> None:
    runs = [f"20260102-030405-{number:04x}" for number in range(200)]
    ports = [port_of(run_id) for run_id in runs]
    assert ports == [port_of(run_id) for run_id in runs]
    assert len(set(ports)) > 190
    assert set(ports) <= set(range(20000, 30000))


def test_a_run_meets_at_the_next_port_that_node_0_has_free_unless_one_was_asked_for() -> None:
    first, second = (node.name for node in TWO_4090.nodes)
    last = next(run_id for run_id in map(str, range(100_000)) if candidate_ports(run_id, None)[0] == 29999)
    assert port_of(last) == 29999
    assert port_of(last, first, (29999,)) == 20000
    assert port_of(last, first, (29999, 20000)) == 20001
    assert port_of(last, second, (29999,)) == 29999
    assert port_of(last, first, (29500,), asked=29500) == 29500


def test_ranks_follow_the_order_of_the_hostfile_and_meet_at_its_first_node() -> None:
    nodes = tuple(Node(name=name, slots=3, addr=f"10.0.0.{last}") for name, last in (("z", 9), ("a", 1), ("m", 5)))
    plan = plan_launch(make.cluster(*nodes), SCRIPT, {}, "r", LaunchOptions(master_port=1234))
    assert [(node.place.node, node.place.ranks) for node in plan.nodes] == [
        ("z", (0, 1, 2)),
        ("a", (3, 4, 5)),
        ("m", (6, 7, 8)),
    ]
    assert plan.rendezvous == Rendezvous(addr="10.0.0.9", port=1234, workers=(3, 3, 3))
    for rank, node in enumerate(plan.nodes):
        assert {"--nnodes=3", f"--node-rank={rank}", "--nproc-per-node=3"} <= set(node.command.argv)
        assert {"--master-addr=10.0.0.9", "--master-port=1234"} <= set(node.command.argv)


def test_fewer_workers_than_gpus_take_the_first_gpus_of_each_node() -> None:
    plan = plan_launch(TWO_4090, SFT, FACTS, "r", LaunchOptions(workers_per_node=1))
    assert [node.command.env["CUDA_VISIBLE_DEVICES"] for node in plan.nodes] == ["6", "1"]
    assert [node.command.env["NPROC_PER_NODE"] for node in plan.nodes] == ["1", "1"]


def test_the_users_own_variables_win() -> None:
    env = {"MASTER_PORT": "1", "NCCL_SOCKET_IFNAME": "=bond0", "MINE": "x"}
    cluster = make.cluster(Node(name="a", env=env))
    for job in (SFT, SCRIPT):
        command = plan_launch(cluster, job, {}, "r", LaunchOptions()).nodes[0].command
        assert env.items() <= command.env.items()


def test_variables_of_the_command_line_win_over_the_hostfiles_and_ours() -> None:
    around = JobEnvironment(env={"MASTER_PORT": "2", "MINE": "y", "RANK": "9"})
    cluster = make.cluster(Node(name="a", env={"MASTER_PORT": "1", "MINE": "x", "KEPT": "z"}))
    for engine in ("torchrun", "deepspeed", "accelerate", "exec"):
        options = LaunchOptions(engine=Engine(name=engine), environment=around)
        command = plan_launch(cluster, SCRIPT, {}, "r", options).nodes[0].command
        assert {"MASTER_PORT": "2", "MINE": "y", "RANK": "9", "KEPT": "z"}.items() <= command.env.items()


def test_behind_a_prelude_only_a_named_interpreter_is_known() -> None:
    options = LaunchOptions(environment=JobEnvironment(prelude="conda activate train"))
    first, second = plan_launch(
        make.cluster("box1", Node(name="box2", python="~/env/bin/python")),
        SFT,
        FACTS,
        "r",
        options,
    ).nodes
    assert (first.command.path_first, "RANK" in first.command.env) == (None, True)
    assert len(first.assumed) == 1
    assert (second.command.path_first, second.assumed) == ("/home/box2/env/bin", ())


def test_gloo_needs_no_gpu_of_a_worker() -> None:
    gloo = msgspec.structs.replace(COLLECTIVES, backend="gloo")
    nine = LaunchOptions(workers_per_node=9)
    assert plan_launch(make.cluster("box1", "box2"), gloo, FACTS, "r", nine).world_size == 18


def test_all_workers_get_one_backend_that_every_node_can_run() -> None:
    open_test = msgspec.structs.replace(COLLECTIVES, backend=None)
    cpu = msgspec.structs.replace(FACTS["box2"], gpus=())
    unnamed = make.cluster(Node(name="box1", slots=1), Node(name="box2", slots=1))
    for facts, backend in ((FACTS, "nccl"), (FACTS | {"box2": cpu}, "gloo"), ({}, None)):
        planned = plan_launch(unnamed, open_test, facts, "r", LaunchOptions())
        assert isinstance(planned.test, CollectiveTest)
        assert planned.test.backend == backend
        requests = [json.loads(node.command.env["MULTINODE_REQUEST"]) for node in planned.nodes]
        assert [request["backend"] for request in requests] == [backend] * 2


def test_a_route_over_another_nic_is_noted_in_the_plan() -> None:
    astray = msgspec.structs.replace(
        FACTS["box1"], routes=(Route(peer="10.0.0.2", source="192.168.0.7", ifname="wlan0"),)
    )
    plan = plan_launch(TWO_4090, SCRIPT, FACTS | {"box1": astray}, "r", LaunchOptions())
    (note,) = plan.notes
    assert note.message == "box1 sends to 10.0.0.2 over wlan0 but listens on ens1f0"
    assert note.figures == {"peer": "10.0.0.2", "ifname": "wlan0", "listens_on": "ens1f0"}


def test_a_route_that_leaves_by_another_nic_than_the_one_listened_on_is_told() -> None:
    routes = (
        Route(peer="10.0.0.1", source="10.0.0.1", ifname="lo"),
        Route(peer="10.0.0.2", source="192.168.1.5", ifname="wlan0"),
        Route(peer="10.0.0.3", source=Unknown("Network is unreachable")),
        Route(peer="10.0.0.4", source="10.0.0.1", ifname="eno1"),
    )
    cluster = make.cluster(Node(name="a"), Node(name="b"))
    endpoints = (Endpoint(addr="10.0.0.1", ifname="eno1"), Endpoint(addr="10.0.0.2", ifname="eno1"))
    found = [*route_notes(cluster, endpoints, {"a": NodeFacts(node="a", routes=routes)})]
    assert [(note.code, note.node, note.message) for note in found] == [
        ("other-interface", "a", "a sends to 10.0.0.2 over wlan0 but listens on eno1"),
        ("no-route", "a", "a has no route to 10.0.0.3: Network is unreachable"),
    ]


UNEQUAL = make.cluster(Node(name="a", slots=4, addr="10.0.0.1"), Node(name="b", slots=2), Node(name="c", slots=3))


@pytest.mark.parametrize("engine", ["torchrun", "deepspeed", "accelerate", "exec"])
def test_unequal_nodes_have_as_many_workers_as_they_have_slots(engine: str) -> None:
    plan = plan_launch(UNEQUAL, SCRIPT, {}, "r", LaunchOptions(engine=Engine(name=engine), observation=traced(3)))
    assert [node.place.ranks for node in plan.nodes] == [(0, 1, 2, 3), (4, 5), (6, 7, 8)]
    assert (plan.world_size, plan.workers) == (9, (4, 2, 3))
    assert plan.observation == traced(3, 0, 4, 6)
    second = plan.nodes[1].command
    if engine == "torchrun":
        assert {"--nnodes=3", "--node-rank=1", "--nproc-per-node=2"} <= set(second.argv)
    elif engine == "exec":
        assert (second.env["NNODES"], second.env["NPROC_PER_NODE"]) == ("3", "2")
    elif engine == "deepspeed":
        (world,) = (word.removeprefix("--world_info=") for word in second.argv if word.startswith("--world_info="))
        devices = json.loads(base64.urlsafe_b64decode(world))
        assert {name: len(ids) for name, ids in devices.items()} == {"node-0": 4, "node-1": 2, "node-2": 3}
    else:
        # Accelerate divides it by the machines to get the workers of this one.
        assert "num_machines: 3\nnum_processes: 6\n" in plan.nodes[1].files[0].text


def test_a_llamafactory_job_on_unequal_nodes_has_each_nodes_own_number() -> None:
    plan = plan_launch(UNEQUAL, SFT, {}, "r", LaunchOptions())
    assert [node.command.env["NPROC_PER_NODE"] for node in plan.nodes] == ["4", "2", "3"]
    averaged = plan_launch(UNEQUAL, SFT, {}, "r", LaunchOptions(levers=Levers(averaging=Averaging(every=4))))
    assert json.loads(averaged.nodes[2].command.env["MULTINODE_SYNC"])["workers"] == [4, 2, 3]
    assert plan_launch(UNEQUAL, SFT, {}, "r", LaunchOptions(workers_per_node=2)).workers == (2, 2, 2)


BALANCE = Balance(speeds={"box1": 5.0, "box2": 3.0}, run_id="r0")


def test_faster_nodes_get_more_samples_and_the_plan_says_how_many() -> None:
    job = msgspec.structs.replace(
        SFT, config=SFT.config | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    )
    plan = plan_launch(TWO_4090, job, FACTS, "r", LaunchOptions(levers=Levers(balance=BALANCE)))
    assert plan.levers.balance == BALANCE
    assert plan.notes[-1].message == (
        "samples per step per worker: box1 10, box2 6 (--balance box1=5,box2=3, as measured in run r0)"
    )
    for node in plan.nodes:
        told = json.loads(node.command.env["MULTINODE_BALANCE"])
        assert told == {"speeds": [5.0, 5.0, 3.0, 3.0], "accumulation": 4, "option": "--balance box1=5,box2=3"}
    script = plan_launch(TWO_4090, SCRIPT, FACTS, "r", LaunchOptions(levers=Levers(balance=BALANCE)))
    assert script.notes[-1].message.startswith("relative number of samples per worker: box1 5, box2 3 (")
    one = plan_launch(TWO_4090.first(1), SCRIPT, FACTS, "r", LaunchOptions(levers=Levers(balance=BALANCE)))
    assert one.levers.balance is None
    assert one.notes[-1].message == "--balance box1=5,box2=3 has no effect if the job runs on one node"
    assert "MULTINODE_BALANCE" not in one.nodes[0].command.env


def test_what_cannot_be_balanced_is_refused_before_the_start(golden: Golden) -> None:
    unprofiled = {"observation": Observation(profile=False)}
    accelerate = {"engine": Engine(name="accelerate", accelerate={"distributed_type": "FSDP"})}
    other = Balance(speeds={"box1": 1.0})
    cases: dict[str, tuple[Job, Levers, dict[str, Any]]] = {
        "deepspeed": (sft(deepspeed="ds.json"), NONE, {}),
        "fsdp": (sft(fsdp="full_shard"), NONE, {}),
        "accelerate with fsdp": (SCRIPT, NONE, accelerate),
        "no instrumentation": (BARE_SFT, NONE, unprofiled),
        "--average": (BARE_SFT, Levers(averaging=Averaging(every=4)), {}),
        "streaming": (sft(streaming=True), NONE, {}),
        "stage": (sft(stage="dpo"), NONE, {}),
        "loss": (sft(use_asft_loss=True), NONE, {}),
        "micro-batches of one": (sft(per_device_train_batch_size=1), NONE, {}),
        "speed of one node": (BARE_SFT, Levers(balance=other), {}),
    }
    golden.check_errors(
        "refused_balance",
        {
            case: error_of(
                plan_launch,
                TWO_4090,
                job,
                FACTS,
                "r",
                LaunchOptions(levers=Levers(balance=BALANCE).joined(levers), **options),
            )
            for case, (job, levers, options) in cases.items()
        },
    )


GROUPED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "fsdp: hybrid_shard": ({"fsdp": "hybrid_shard auto_wrap"}, {}, {}),
    "sharding_strategy: HYBRID_SHARD_ZERO2": ({"fsdp_config": {"sharding_strategy": "HYBRID_SHARD_ZERO2"}}, {}, {}),
    "tensor_parallel_size: 2": ({"tensor_parallel_size": 2}, {}, {}),
    "zero_hpz_partition_size: 4": ({}, {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}, {}),
    "zero_quantized_gradients: true": ({}, {"zero_optimization": {"zero_quantized_gradients": True}}, {}),
    "mics_shard_size: 8": ({}, {"zero_optimization": {"mics_shard_size": 8}}, {}),
    "autotp_size: 2": ({}, {"tensor_parallel": {"autotp_size": 2}}, {}),
    "fsdp_sharding_strategy: 4": ({}, {}, {"fsdp_config": {"fsdp_sharding_strategy": 4}}),
    "distributed_type: MEGATRON_LM": ({}, {}, {"distributed_type": "MEGATRON_LM"}),
}


def test_what_groups_the_workers_of_a_node_needs_as_many_on_each(golden: Golden) -> None:
    refused: dict[str, MultinodeError] = {}
    for setting, (config, deepspeed, accelerate) in GROUPED.items():
        job: Job = SCRIPT
        if not accelerate:
            text = json.dumps(deepspeed) if deepspeed else None
            job = msgspec.structs.replace(SFT, config=SFT.config | config, deepspeed_text=text)
        options = LaunchOptions(engine=Engine(name="accelerate", accelerate=accelerate) if accelerate else None)
        refused[setting] = error_of(plan_launch, UNEQUAL, job, {}, "r", options)
        equal = msgspec.structs.replace(options, workers_per_node=2)
        assert plan_launch(UNEQUAL, job, {}, "r", equal).world_size == 6
    for line in (
        "--fsdp 'hybrid_shard auto_wrap'",
        "--fsdp=hybrid_shard_zero2",
        "--lr 1 --tensor-model-parallel-size 2",
        "--tp_size=4",
    ):
        refused[line] = error_of(plan_launch, UNEQUAL, script(line), {}, "r", LaunchOptions())
    golden.check_errors("refused_unequal", refused)


def test_options_of_a_script_that_group_no_workers_do_not_need_equal_nodes() -> None:
    for line in ("--tp_size 1 --fsdp full_shard", "--notes hybrid_shard tp_size 2"):
        assert plan_launch(UNEQUAL, script(line), {}, "r", LaunchOptions()).world_size == 9


def test_a_benchmark_measures_with_the_workers_of_unequal_nodes() -> None:
    plan = plan_launch(UNEQUAL, CollectiveTest(messages=()), {}, "r", LaunchOptions())
    assert (plan.workers, plan.world_size) == ((4, 2, 3), 9)


def test_so_many_workers_on_each_node_are_an_option_or_slots() -> None:
    cluster = msgspec.structs.replace(UNEQUAL, nodes=(*UNEQUAL.nodes, Node(name="d", gpus=(4, 5, 6), slots=3)))
    same, options = with_workers(cluster, LaunchOptions(), (2, 2, 2, 2))
    assert (same, options.workers_per_node) == (cluster, 2)
    fewer, options = with_workers(cluster, LaunchOptions(workers_per_node=1), (4, 1, 3, 2))
    assert options.workers_per_node is None
    assert [node.slots for node in fewer.nodes] == [4, 1, 3, 2]
    assert fewer.nodes[3].gpus == (4, 5)


@pytest.mark.parametrize(
    ("node", "gpus", "asked", "expected"),
    [
        (Node(name="a"), 0, None, 1),
        (Node(name="a"), 8, None, 8),
        (Node(name="a", slots=2), 8, None, 2),
        (Node(name="a", gpus=(6, 7)), 8, None, 2),
        (Node(name="a"), 0, 4, 4),
        (Node(name="a", slots=4), 0, 3, 3),
    ],
)
def test_workers_are_what_was_asked_else_the_slots_else_the_gpus_else_one(
    node: Node, gpus: int, asked: int | None, expected: int
) -> None:
    found = NodeFacts(node="a", gpus=tuple(Gpu(index=index, name="x") for index in range(gpus)))
    assert workers_of_nodes(make.cluster(node), {"a": found}, asked) == (expected,)


def test_a_window_of_the_profiler_is_on_the_first_worker_of_each_node_or_where_it_was_asked_for() -> None:
    asked = LaunchOptions(observation=traced(5))
    assert plan_launch(TWO_4090, SCRIPT, {}, "r", asked).observation == traced(5, 0, 2)
    chosen = plan_launch(TWO_4090, SCRIPT, {}, "r", LaunchOptions(observation=traced(5, 3)))
    assert chosen.observation == traced(5, 3)


# Two GPUs of another model: CUDA would count these first.
MODELS = ("NVIDIA T4", "NVIDIA T4", "NVIDIA H100", "NVIDIA H100")
MIXED = tuple(Gpu(index=index, name=name, uuid=f"GPU-{index}{index}aa") for index, name in enumerate(MODELS))
UNNAMED = tuple(msgspec.structs.replace(gpu, uuid=None) for gpu in MIXED)


@pytest.mark.parametrize(
    ("node", "gpus", "session", "given", "expected"),
    [
        (Node(name="a", slots=2), MIXED, None, None, ("0,1", (0, 1))),
        (Node(name="a", gpus=(3, 1)), MIXED, None, None, ("3,1", (3, 1))),
        (Node(name="a", gpus=(3, 1)), UNNAMED, None, None, ("3,1", (3, 1))),
        (Node(name="a", gpus=(3, 1)), (), None, None, ("3,1", (3, 1))),
        # What the node's sessions show is all that is used, in its order.
        (Node(name="a", slots=2), MIXED, "3,0", None, ("3,0", (3, 0))),
        (Node(name="a", slots=2), MIXED, "GPU-2,GPU-33aa", None, ("2,3", (2, 3))),
        (Node(name="a"), MIXED, "1", None, ("1", (1,))),
        (Node(name="a"), MIXED, "2,7,0", None, ("2", (2,))),
        # More workers than GPUs are a check's to refuse; a MIG device is left to CUDA.
        (Node(name="a", slots=2), MIXED, "1", None, (None, (1,))),
        (Node(name="a", slots=2), MIXED, "MIG-1c2,MIG-1c3", None, (None, None)),
        # The user's own choice wins.
        (Node(name="a", slots=2), MIXED, "0,1", "2,3,1", ("2,3,1", (2, 3))),
        (Node(name="a", slots=2), MIXED, None, "GPU-33", ("GPU-33", (3,))),
        (Node(name="a", slots=2), (), None, "5,7", ("5,7", (5, 7))),
        (Node(name="a", slots=2), (), None, "GPU-33", ("GPU-33", None)),
        (Node(name="a", slots=2), (), None, None, (None, None)),
    ],
)
def test_workers_get_gpus_that_the_node_shows_by_number_and_these_are_sampled(
    node: Node,
    gpus: tuple[Gpu, ...],
    session: str | None,
    given: str | None,
    expected: tuple[str | None, tuple[int, ...] | None],
) -> None:
    name = "CUDA_VISIBLE_DEVICES"
    found = msgspec.structs.replace(FACTS["box1"], node="a", gpus=gpus, env={name: session} if session else {})
    options = LaunchOptions(environment=JobEnvironment(env={name: given} if given else {}))
    cluster = make.cluster(msgspec.structs.replace(node, addr="10.0.0.1"))
    plan = plan_launch(cluster, SCRIPT, {"a": found}, "r", options).nodes[0]
    assert (plan.command.env.get(name), plan.gpus) == expected
    assert plan.command.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize("given", [{}, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}])
@pytest.mark.parametrize("gpus", [MIXED, UNNAMED])
def test_where_the_user_has_another_order_a_number_could_be_another_gpu(
    given: dict[str, str], gpus: tuple[Gpu, ...]
) -> None:
    found = msgspec.structs.replace(FACTS["box1"], node="a", gpus=gpus, env={"CUDA_VISIBLE_DEVICES": "3,0"})
    for node, option in ((given, {}), ({}, given)):
        cluster = make.cluster(Node(name="a", env=node, addr="10.0.0.1"))
        options = LaunchOptions(environment=JobEnvironment(env=option))
        plan = plan_launch(cluster, SCRIPT, {"a": found}, "r", options).nodes[0]
        by_uuid = "FASTEST_FIRST" in given.values() and gpus is MIXED
        assert plan.command.env["CUDA_VISIBLE_DEVICES"] == ("GPU-33aa,GPU-00aa" if by_uuid else "3,0")
        assert plan.gpus == (3, 0)


@pytest.mark.parametrize(
    ("kind", "session", "expected"),
    [
        # HIP counts what ROCr shows: its second is the machine's fourth.
        (
            "rocm",
            {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1,0"},
            {"ROCR_VISIBLE_DEVICES": "GPU-33aa,GPU-22aa", "NCCL_SOCKET_IFNAME": "=ens1f0"},
        ),
        (
            "xpu",
            {"ZE_AFFINITY_MASK": "1,3"},
            {"ZE_AFFINITY_MASK": "1,3", "CCL_KVS_IFACE": "ens1f0", "FI_TCP_IFACE": "ens1f0"},
        ),
        ("npu", {}, {"ASCEND_RT_VISIBLE_DEVICES": "0,1", "HCCL_SOCKET_IFNAME": "=ens1f0"}),
    ],
)
def test_other_accelerators_get_their_own_variables_and_no_device_that_is_hidden(
    kind: str, session: dict[str, str], expected: dict[str, str]
) -> None:
    nic = Interface(name="ens1f0", addresses=("10.0.0.1/24",), up=True)
    found = msgspec.structs.replace(
        FACTS["box1"], node="a", gpus=MIXED, env=session, accelerator=kind, interfaces=(nic,)
    )
    cluster = make.cluster(Node(name="a", slots=2, addr="10.0.0.1"))
    plan = plan_launch(cluster, SCRIPT, {"a": found}, "r", LaunchOptions()).nodes[0]
    env = plan.command.env
    assert {name: env.get(name) for name in expected} == expected
    assert env["GLOO_SOCKET_IFNAME"] == "ens1f0"
    assert not {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NCCL_RAS_ADDR"} & set(env)
    # What hid some of them before would hide more of those that are chosen.
    assert ("HIP_VISIBLE_DEVICES" in plan.command.unset) == (kind == "rocm")


@pytest.mark.parametrize(
    ("kinds", "backend"),
    [
        ((None, None), "nccl"),
        (("rocm", "rocm"), "nccl"),
        (("xpu", "xpu"), "xccl"),
        (("npu", "npu"), "hccl"),
        ((None, "npu"), "gloo"),
    ],
)
def test_collectives_are_tested_over_the_backend_of_the_nodes(kinds: tuple[str | None, ...], backend: str) -> None:
    nodes = tuple(Node(name=name, slots=1, addr=f"10.0.0.{rank}") for rank, name in enumerate("ab", 1))
    facts = {
        node.name: msgspec.structs.replace(
            FACTS["box1"],
            node=node.name,
            gpus=MIXED,
            accelerator=kind,
            interfaces=(Interface(name="ens1f0", addresses=(f"{node.addr}/24",), up=True),),
        )
        for node, kind in zip(nodes, kinds, strict=True)
    }
    test = CollectiveTest(messages=(Message(size_bytes=8),))
    planned = plan_launch(make.cluster(*nodes), test, facts, "r", LaunchOptions(agent="agent.pyz"))
    assert isinstance(planned.test, CollectiveTest)
    assert planned.test.backend == backend


PLUGIN = "/opt/nccl/lib/libnccl-profiler-inspector.so"


def inspect(node: Node | None = None, observed: dict[str, Any] | None = None, **found: Any) -> NodePlan:
    node = node or Node(name="a", slots=1, addr="10.0.0.1")
    told = {"gpus": MIXED, "nccl_version": "2.28.9", "nccl_inspector": PLUGIN} | found
    facts = {"a": msgspec.structs.replace(FACTS["box1"], node="a", **told)}
    asked = LaunchOptions(observation=Observation(**{"nccl_inspector": True} | (observed or {})))
    return plan_launch(make.cluster(node), SCRIPT, facts, "r", asked).nodes[0]


def test_nccls_inspector_is_loaded_and_writes_below_the_runs_directory() -> None:
    plan = inspect()
    assert {name: value for name, value in plan.command.env.items() if "INSPECTOR" in name or "PLUGIN" in name} == {
        "NCCL_PROFILER_PLUGIN": PLUGIN,
        "NCCL_INSPECTOR_ENABLE": "1",
        "NCCL_INSPECTOR_DUMP_DIR": f"{plan.place.run_dir}/nccl-inspector",
        "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "500000",
    }
    # The user's own choice wins, also where none was found.
    named = Node(name="a", slots=1, addr="10.0.0.1", env={"NCCL_PROFILER_PLUGIN": "/my/inspector.so"})
    assert inspect(named, nccl_inspector=UNASKED).command.env["NCCL_PROFILER_PLUGIN"] == "/my/inspector.so"
    assert "NCCL_INSPECTOR_ENABLE" not in inspect(observed={"nccl_inspector": False}).command.env


def test_nccls_inspector_where_it_cannot_be_is_refused(golden: Golden) -> None:
    cases: dict[str, dict[str, Any]] = {
        "no plugin": {"nccl_inspector": None},
        "old NCCL": {"nccl_version": "2.27.5"},
        "no GPU": {"gpus": ()},
        "NPUs": {"accelerator": "npu"},
        "no instrumentation": {"observed": {"profile": False}},
    }
    golden.check_errors("refused_inspector", {case: error_of(inspect, **found) for case, found in cases.items()})


def test_a_program_of_the_users_own_gets_all_gpus_that_the_node_shows() -> None:
    found = msgspec.structs.replace(FACTS["box1"], node="a", gpus=MIXED, env={"CUDA_VISIBLE_DEVICES": "2,3"})
    options = LaunchOptions(engine=Engine(name="exec"))
    cluster = make.cluster(Node(name="a", slots=1, addr="10.0.0.1"))
    env = plan_launch(cluster, SCRIPT, {"a": found}, "r", options).nodes[0].command.env
    assert env["CUDA_VISIBLE_DEVICES"] == "2,3"


@pytest.mark.parametrize("kind", ["fp16", "bf16", "powersgd", "powersgd:2", "powersgd:8:100"])
@pytest.mark.parametrize("name", sorted(set(ENGINES) - {"llamafactory"}))
def test_the_workers_of_every_node_are_told_whoever_starts_them(name: str, kind: str) -> None:
    planned = plan(BARE_SCRIPT, engine=Engine(name=name), levers=compressed(kind))
    assert planned.levers == compressed(kind)
    assert [node.command.env[VARIABLE] for node in planned.nodes] == [kind, kind]


def test_a_llamafactory_training_under_ddp_is_told_too() -> None:
    for job in (BARE_SFT, sft(deepspeed=None, fsdp=None)):
        assert [node.command.env[VARIABLE] for node in plan(job, levers=compressed("fp16")).nodes] == ["fp16", "fp16"]


def test_nobody_is_told_what_was_not_asked_for() -> None:
    test = CollectiveTest(messages=(Message(size_bytes=8),), backend="gloo")
    for planned in (plan(BARE_SCRIPT), plan(BARE_SFT), plan(test, levers=compressed("fp16"))):
        assert planned.levers == NONE
        assert [VARIABLE in node.command.env for node in planned.nodes] == [False, False]


def test_what_cannot_be_compressed_is_refused_with_a_way_out(golden: Golden) -> None:
    fsdp = Engine(name="accelerate", accelerate={"distributed_type": "FSDP"})
    kinds = ("int8", "", "PowerSGD", "powersgd:", "powersgd:0", "powersgd:4:", "powersgd:4:x", "powersgd:4:1:1")
    cases: dict[str, tuple[Job, str, dict[str, Any]]] = {repr(kind): (BARE_SCRIPT, kind, {}) for kind in kinds} | {
        "no instrumentation": (BARE_SCRIPT, "fp16", {"observation": Observation(profile=False)}),
        "DeepSpeed's JSON": (sft(deepspeed="configs/ds_z2.json"), "fp16", {}),
        "DeepSpeed in the YAML": (sft(deepspeed={"zero_optimization": {"stage": 2}}), "bf16", {}),
        "fsdp": (sft(fsdp="full_shard auto_wrap"), "fp16", {}),
        "accelerate with fsdp": (BARE_SCRIPT, "fp16", {"engine": fsdp}),
    }
    golden.check_errors(
        "refused_compression",
        {case: error_of(plan, job, levers=compressed(kind), **options) for case, (job, kind, options) in cases.items()},
    )


def test_a_configuration_of_accelerate_that_makes_ddp_is_no_reason_to_refuse() -> None:
    engine = Engine(name="accelerate", accelerate={"distributed_type": "MULTI_GPU", "mixed_precision": "bf16"})
    assert plan(BARE_SCRIPT, engine=engine, levers=compressed("bf16")).levers == compressed("bf16")


def test_a_plan_carries_what_the_hostfile_names_and_only_nccl_has_hcas() -> None:
    rails = (Interface(name="ens1f1", addresses=("10.1.0.1/24",), up=True),)
    found = msgspec.structs.replace(
        FACTS["box1"],
        interfaces=or_empty(FACTS["box1"].interfaces) + rails,
        rdma=(RdmaPort(device="mlx5_0", port=1, state="ACTIVE"),),
    )
    named = msgspec.structs.replace(TWO_4090.nodes[0], ifname="ens1f0,ens1f1", hca="mlx5_0")
    cluster = msgspec.structs.replace(TWO_4090, nodes=(named, TWO_4090.nodes[1]))
    first, second = plan_launch(cluster, SCRIPT, FACTS | {"box1": found}, "r", LaunchOptions()).nodes
    assert (first.place.endpoint.ifname, first.place.endpoint.ifnames, second.place.endpoint.ifnames) == (
        "ens1f0",
        ("ens1f0", "ens1f1"),
        (),
    )
    assert (first.command.env["NCCL_SOCKET_IFNAME"], first.command.env["NCCL_IB_HCA"]) == ("=ens1f0,ens1f1", "=mlx5_0")
    assert "NCCL_IB_HCA" not in second.command.env


def test_what_the_nodes_cannot_run_is_refused(golden: Golden) -> None:
    def planned(nodes: Cluster, job: Job | CollectiveTest = SCRIPT, **options: Any) -> MultinodeError:
        return error_of(plan_launch, nodes, job, FACTS, "r", LaunchOptions(**options))

    hca = make.cluster(Node(name="box1", hca="mlx5_0"))
    port = RdmaPort(device="mlx5_0", port=1, state="ACTIVE")
    intel = {"box1": msgspec.structs.replace(FACTS["box1"], accelerator="xpu", rdma=(port,))}
    golden.check_errors(
        "refused_nodes",
        {
            "a collective of one worker": planned(make.cluster(Node(name="box1", slots=1)), COLLECTIVES),
            "more workers than GPUs": planned(make.cluster("box1", "box2"), COLLECTIVES, workers_per_node=9),
            "more workers than slots": planned(TWO_4090, workers_per_node=3),
            "a trace of no rank": planned(TWO_4090, observation=traced(5, 4)),
            "a trace without instrumentation": planned(
                TWO_4090, observation=msgspec.structs.replace(traced(5), profile=False)
            ),
            "hca= without NCCL": error_of(plan_launch, hca, SCRIPT, intel, "r", LaunchOptions()),
        },
    )
