from __future__ import annotations

import shlex

import pytest

from multinode.cluster.hostfile import parse_hostfile
from multinode.errors import UsageError
from multinode.job.job import ScriptJob
from multinode.job.typed_command import Settled, TypedCommand, read_command, settle, starts_program

TWO = parse_hostfile("a slots=2\nb slots=2\n", "hosts")
SILENT = parse_hostfile("a\nb\n", "hosts")


def read(text: str, engine: str | None = None) -> TypedCommand:
    return read_command(tuple(shlex.split(text)), engine)


def refused(text: str, engine: str | None = None) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read(text, engine)
    return caught.value


@pytest.mark.parametrize(
    ("text", "engine", "script"),
    [
        ("train.py --lr 1", None, ScriptJob(argv=("train.py", "--lr", "1"))),
        ("python -u train.py -u", None, ScriptJob(argv=("train.py", "-u"))),
        ("python3.11 -m pkg.train x", None, ScriptJob(argv=("pkg.train", "x"), form="module")),
        ("torchrun train.py --nnodes 3", "torchrun", ScriptJob(argv=("train.py", "--nnodes", "3"))),
        ("torchrun --tee 3 -m pkg", "torchrun", ScriptJob(argv=("pkg",), form="module", options=("--tee", "3"))),
        (
            "torchrun --no_python ./run -m 3",
            "torchrun",
            ScriptJob(argv=("./run", "-m", "3"), form="executable"),
        ),
        ("--max-restarts=3 train.py", None, ScriptJob(argv=("train.py",), options=("--max-restarts=3",))),
        ("torchrun -- train.py", "torchrun", ScriptJob(argv=("train.py",))),
        # An option of a newer release: what follows shows whether it takes a value.
        (
            "torchrun --new 3 --newer train.py",
            "torchrun",
            ScriptJob(argv=("train.py",), options=("--new", "3", "--newer")),
        ),
        (
            "accelerate-launch --mixed_precision bf16 train.py",
            "accelerate",
            ScriptJob(argv=("train.py",), options=("--mixed_precision", "bf16")),
        ),
        ("ds --no_local_rank t.py", "deepspeed", ScriptJob(argv=("t.py",), options=("--no_local_rank",))),
        ("deepspeed --module pkg --deepspeed", "deepspeed", ScriptJob(argv=("pkg", "--deepspeed"), form="module")),
    ],
)
def test_a_command_is_its_launchers_own_options_and_its_program(
    text: str, engine: str | None, script: ScriptJob
) -> None:
    command = read(text)
    assert (command.engine, command.script, command.stated) == (engine, script, ())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("torchrun --nnodes 2 --node_rank=0 --standalone t.py", ["--nnodes 2", "--node_rank=0", "--standalone"]),
        # Variables of the shell that are not set leave empty words, or none.
        ("torchrun --nnodes= --node_rank --master_addr '' t.py", ["--nnodes=", "--node_rank", "--master_addr "]),
        ("NODE_RANK=0 PET_X=1 FORCE_TORCHRUN=1 python t.py", ["NODE_RANK=0", "PET_X=1", "FORCE_TORCHRUN=1"]),
        ("deepspeed --hostfile h -i a:0 --launcher pdsh --ssh_port 22 t.py", None),
    ],
)
def test_what_says_where_a_job_runs_is_left_to_the_hostfile(text: str, said: list[str] | None) -> None:
    command = read(text)
    replaced = settle(command, SILENT).replaced
    assert list(replaced) == (said or ["--hostfile h", "-i a:0", "--launcher pdsh", "--ssh_port 22"])
    assert command.script is not None
    assert command.script.options == ()


def test_an_empty_word_is_not_a_program() -> None:
    assert read("torchrun --master_addr '' t.py").script == ScriptJob(argv=("t.py",))


@pytest.mark.parametrize(
    ("text", "python"),
    [
        ("/opt/venv/bin/python t.py", "/opt/venv/bin/python"),
        ("python3.11 t.py", "python3.11"),
        ("/opt/venv/bin/torchrun t.py", "/opt/venv/bin/python"),
        ("python t.py", None),
        ("torchrun t.py", None),
    ],
)
def test_the_path_of_a_launcher_names_the_interpreter(text: str, python: str | None) -> None:
    assert read(text).python == python


def test_variables_in_front_are_the_jobs() -> None:
    command = read("env A=1 nohup time NCCL_DEBUG=WARN OMP_NUM_THREADS='' torchrun t.py")
    assert command.env == {"A": "1", "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": ""}
    assert command.notes == ("nohup: use --detach to leave the run alone",)
    assert read("conda run -n 'my env' --no-capture-output python t.py").setup == "conda activate 'my env'"
    assert read("uv run --frozen torchrun t.py").setup == ". .venv/bin/activate"


def test_a_llamafactory_command_has_a_yaml_or_flags() -> None:
    command = read("lmf train x.yaml learning_rate=1e-5 bf16=true")
    assert (command.engine, command.config) == ("llamafactory", "x.yaml")
    assert command.settings == ("learning_rate=1e-5", "bf16=true")
    assert read("llamafactory-cli train --stage sft").flags == ("--stage", "sft")
    assert read("x.yml").config == "x.yml"
    assert (read("torchrun --max_restarts 1 x.yml").engine, read("x.yml", "deepspeed").engine) == (
        "torchrun",
        "deepspeed",
    )


def test_torchs_old_launcher_passes_the_local_rank_unless_it_is_told_otherwise() -> None:
    assert read("python -m torch.distributed.launch --nproc_per_node=2 t.py").passes_local_rank
    assert not read("python -m torch.distributed.launch --use_env t.py").passes_local_rank
    assert not read("python -m torch.distributed.run t.py").passes_local_rank


def test_options_of_accelerate_that_a_configuration_would_undo_become_keys_of_it() -> None:
    command = read("accelerate launch --config_file c.yaml --cpu --use_deepspeed --zero_stage 2 t.py")
    assert command.accelerate == {"use_cpu": True, "distributed_type": "DEEPSPEED"}
    assert command.accelerate_config == "c.yaml"
    assert command.script == ScriptJob(argv=("t.py",), options=("--zero_stage", "2"))


def test_a_module_of_the_interpreter_is_one_under_every_engine() -> None:
    script = ScriptJob(argv=("pkg", "-m"), form="module")
    assert {read("python -m pkg -m", engine).script for engine in (None, "torchrun", "deepspeed", "accelerate")} == {
        script
    }


def test_the_exec_engine_reads_nothing() -> None:
    words = ("torchrun", "--nnodes", "3", "t.py")
    assert read_command(words, "exec").script == ScriptJob(argv=words, form="executable")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("python -O t.py", "the option -O of python is not passed", "--env PYTHONOPTIMIZE=1"),
        ("python -Xfaulthandler t.py", "the option -Xfaulthandler", "--env PYTHONFAULTHANDLER=1"),
        ("python -c pass", "python -c starts no script", "write it into a file"),
        ("python", "python starts no script", "write it into a file"),
        ("mpirun -np 4 -H a:2 python t.py --lr 1", "mpirun is not started", "multinode launch -- python t.py --lr 1"),
        ("srun -N2 torchrun t.py", "srun is not started", "multinode launch -- torchrun t.py"),
        ("docker run --gpus all image torchrun t.py", "docker is not started", "multinode launch -- torchrun t.py"),
        ("sudo python t.py", "sudo is not started", "multinode launch -- python t.py"),
        ("ray job submit -- python t.py", "ray is not started", "multinode launch -- python t.py"),
        ("torchx run dist.ddp --script t.py", "torchx is not started", "multinode launch -- t.py"),
        ("poetry run python t.py", "poetry is not started", "--setup 'eval \"$(poetry env activate)\"' -- python t.py"),
        (
            "NPROC_PER_NODE=4 HF_TOKEN=hf_s3cretS3CRETs3cret1234 swift sft",
            "swift",
            "--env HF_TOKEN --workers-per-node 4",
        ),
        ("srun python t.py --token hf_s3cretS3CRETs3cret1", "srun", "-- python t.py --token '<redacted>'"),
        ("numactl --membind 0 python t.py", "numactl is not started", "multinode launch -- python t.py"),
        ("swift sft --model m", "swift is not started", "multinode launch -- -m swift.cli.sft --model m"),
        (
            "A=1 axolotl train x.yml",
            "axolotl is not started",
            "multinode launch --env A=1 --engine accelerate -- -m axolotl.cli.train x.yml",
        ),
        ("trl dpo --a b", "trl is not started", "multinode launch --engine accelerate -- -m trl.scripts.dpo --a b"),
        ("llamafactory-cli chat x.yaml", "llamafactory-cli chat is not started: it is no training", None),
        ("accelerate test", "accelerate test is not started: it is no training", None),
        ("bash -c 'torchrun t.py'", "bash -c is not read", "multinode launch -- torchrun t.py"),
        ("bash run.sh 2", "bash is neither a Python script", "multinode launch --engine exec -- bash run.sh 2"),
        (
            "NGPU=4 ./run_train.sh",
            "run_train.sh is neither a Python script",
            "launch --env NGPU=4 --engine exec -- ./run_train.sh",
        ),
        ("env -i torchrun t.py", "env -i is not read", "leave it out"),
        ("uv run --with x python t.py", "uv run --with is not read", "uv sync"),
        ("conda run python t.py", "conda run names no environment", "conda run -n NAME"),
        ("torchrun --nnodes 2", "no program follows torchrun --nnodes 2", "multinode launch -- train.py"),
        ("A=1", "no program follows A=1", "multinode launch -- train.py"),
        ("HF_TOKEN=hf_s3cretS3CRETs3cret1", "no program follows 'HF_TOKEN=<redacted>'", "multinode launch -- train.py"),
        ("deepspeed --autotuning run t.py", "--autotuning of deepspeed is not passed on", "leave it out"),
        ("deepspeed --venv_script v t.py", "--venv_script of deepspeed", "--setup 'source SCRIPT'"),
        ("deepspeed -m pkg.train", "deepspeed has no option -m", "write --module"),
        ("torchrun -z t.py", "torchrun has no option -z", None),
        ("torchrun x.yaml more", "'more' after x.yaml is not KEY=VALUE", "x.yaml max_steps=9"),
    ],
)
def test_what_is_not_started_is_answered_with_a_line_that_works(text: str, message: str, hint: str | None) -> None:
    error = refused(text)
    assert error.message.startswith(message)
    assert (hint or "") in (error.hint or "")


def test_another_launcher_than_the_engine_is_refused() -> None:
    assert refused("torchrun t.py", "deepspeed").message == "--engine deepspeed, but the command starts torchrun"
    assert read("torchrun t.py", "torchrun").engine == "torchrun"
    # Any of these engines starts a script of Python.
    assert read("python t.py", "deepspeed").engine == "deepspeed"


@pytest.mark.parametrize(
    ("text", "cluster", "workers"),
    [
        ("torchrun --nproc-per-node 2 t.py", TWO, None),
        ("torchrun --nproc-per-node auto t.py", TWO, None),
        ("torchrun --nnodes=1 --nproc-per-node=gpu t.py", TWO, None),
        ("torchrun --nnodes=1:4 t.py", TWO, None),
        ("accelerate launch --num_processes 4 t.py", TWO, None),
        ("accelerate launch --gpu_ids all t.py", TWO, None),
        ("NPROC_PER_NODE=2 llamafactory-cli train x.yaml", TWO, None),
        # Where the hostfile is silent, the command's number holds.
        ("torchrun --nproc-per-node 8 t.py", SILENT, 8),
        ("accelerate launch --num_processes 16 --num_machines 2 t.py", SILENT, 8),
        ("CUDA_VISIBLE_DEVICES=0,1,2 python t.py", SILENT, 3),
        ("torchrun t.py", SILENT, None),
    ],
)
def test_a_size_that_agrees_with_the_hostfile_says_nothing(text: str, cluster: object, workers: int | None) -> None:
    assert settle(read(text), cluster).workers_per_node == workers  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("torchrun --nnodes=3 t.py", "--nnodes=3, but hosts has 2 nodes", "--nodes 2 uses them all"),
        ("torchrun --nnodes=x t.py", "--nnodes=x is not a number of nodes", "--nodes N"),
        ("torchrun --nproc-per-node=8 t.py", "--nproc-per-node=8 asks for 8 workers on each node", "slots=8"),
        ("torchrun --nproc-per-node=1 t.py", "--nproc-per-node=1 asks for 1 worker", "--workers-per-node 1"),
        ("deepspeed --num_gpus 8 t.py", "--num_gpus 8 asks for 8 workers", "slots=8 on each line of hosts"),
        ("accelerate launch --num_processes 8 t.py", "--num_processes 8 asks for 4 workers on each node", "slots=4"),
        ("accelerate launch --num_processes 3 t.py", "--num_processes 3 counts the workers of all", "leave"),
        ("CUDA_VISIBLE_DEVICES=0 torchrun t.py", "CUDA_VISIBLE_DEVICES=0 asks for 1 worker", "gpus=0 on each line"),
        ("torchrun --nproc-per-node=many t.py", "--nproc-per-node=many is not a number", "slots=K"),
    ],
)
def test_a_size_that_contradicts_the_hostfile_is_refused_with_what_to_type(text: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        settle(read(text), TWO)
    assert caught.value.message.startswith(message)
    assert hint in (caught.value.hint or "")


def test_our_own_options_win_over_a_command() -> None:
    command = read("torchrun --nnodes=3 --nproc-per-node=8 t.py")
    assert settle(command, TWO, nodes=1, workers=1) == Settled(1, {}, ("--nnodes=3",))


def test_gpus_of_the_hostfile_stand_for_those_of_a_command() -> None:
    command = read("A=1 CUDA_VISIBLE_DEVICES=6,7 torchrun --nproc_per_node=2 t.py")
    cluster = parse_hostfile("a gpus=6,7\nb gpus=6,7\n", "hosts")
    assert settle(command, cluster) == Settled(None, {"A": "1"}, ())
    assert settle(command, TWO).env == {"A": "1", "CUDA_VISIBLE_DEVICES": "6,7"}
    assert settle(read("accelerate launch --gpu_ids 6,7 t.py"), SILENT).env == {"CUDA_VISIBLE_DEVICES": "6,7"}
    with pytest.raises(UsageError, match="but hosts has gpus=0,1") as caught:
        settle(command, parse_hostfile("a gpus=6,7\nb gpus=0,1\n", "hosts"))
    assert "gpus=6,7" in (caught.value.hint or "")


@pytest.mark.parametrize("word", ["train.py", "./a/train.py", "run.sh", "torchrun", "python3.11", "accelerate", "srun"])
def test_a_program_in_the_place_of_a_yaml_is_recognised(word: str) -> None:
    assert starts_program(word)
    assert not starts_program("train.yaml")
    assert not starts_program("learning_rate=1")
