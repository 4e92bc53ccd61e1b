from __future__ import annotations

import shlex

import pytest

from multinode.cluster.hostfile import parse_hostfile
from multinode.job.job import ScriptJob, TrainingCommand
from multinode.job.typed_command import Settled, TypedCommand, read_command, settle, starts_program
from tests.golden import Golden, error_of

TWO = parse_hostfile("a slots=2\nb slots=2\n", "hosts")
SILENT = parse_hostfile("a\nb\n", "hosts")


def read(text: str, engine: str | None = None) -> TypedCommand:
    return read_command(tuple(shlex.split(text)), engine)


def training(command: TypedCommand) -> TrainingCommand:
    assert command.training is not None
    return command.training


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
    assert [note.message for note in command.notes] == ["nohup: use --detach to run in the background"]
    conda = read("conda run -n 'my env' --no-capture-output python t.py")
    assert conda.setup == "conda activate 'my env'"
    replaced = f"conda run is replaced by --setup {shlex.quote(conda.setup)}"
    assert [note.message for note in conda.notes] == [replaced]
    assert read("uv run --frozen torchrun t.py").setup == ". .venv/bin/activate"


def test_a_llamafactory_command_has_a_yaml_or_flags() -> None:
    command = read("lmf train x.yaml learning_rate=1e-5 bf16=true")
    assert (training(command).framework, training(command).config) == ("llamafactory", "x.yaml")
    assert command.settings == ("learning_rate=1e-5", "bf16=true")
    assert training(read("llamafactory-cli train --stage sft")).flags == ("--stage", "sft")
    assert training(read("x.yml")) == TrainingCommand(config="x.yml")
    assert (read("torchrun --max_restarts 1 x.yml").engine, read("x.yml", "deepspeed").engine) == (
        "torchrun",
        "deepspeed",
    )


@pytest.mark.parametrize(
    ("text", "engine", "expected"),
    [
        (
            "trl sft --config x.yaml --learning_rate 1e-5",
            None,
            TrainingCommand(
                framework="trl", verb="sft", config="x.yaml", flags=("--learning_rate", "1e-5"), name="trl sft"
            ),
        ),
        (
            "accelerate launch --mixed_precision bf16 trl/scripts/dpo.py --beta 0.1",
            "accelerate",
            TrainingCommand(
                framework="trl",
                verb="dpo",
                program=("trl/scripts/dpo.py",),
                options=("--mixed_precision", "bf16"),
                flags=("--beta", "0.1"),
                name="trl dpo",
            ),
        ),
        (
            "swift rlhf --rlhf_type dpo --model m",
            None,
            TrainingCommand(
                framework="swift", verb="rlhf", flags=("--rlhf_type", "dpo", "--model", "m"), name="swift rlhf"
            ),
        ),
        (
            "torchrun swift/cli/sft.py --model m",
            "torchrun",
            TrainingCommand(
                framework="swift", verb="sft", program=("swift/cli/sft.py",), flags=("--model", "m"), name="swift sft"
            ),
        ),
        (
            "python -m swift.cli.main sft x.yaml max_steps=3",
            None,
            TrainingCommand(framework="swift", verb="sft", config="x.yaml", name="swift sft"),
        ),
        (
            "axolotl train x.yml --launcher torchrun --learning-rate 1e-5 -- --max-restarts 2",
            "torchrun",
            TrainingCommand(
                framework="axolotl",
                verb="train",
                options=("--max-restarts", "2"),
                config="x.yml",
                flags=("--learning-rate", "1e-5"),
                name="axolotl train",
            ),
        ),
        (
            "accelerate launch -m axolotl.cli.train x.yml",
            "accelerate",
            TrainingCommand(
                framework="axolotl",
                verb="train",
                program=("--module", "axolotl.cli.train"),
                config="x.yml",
                name="axolotl train",
            ),
        ),
    ],
)
def test_a_framework_is_known_by_its_command_its_module_or_its_script(
    text: str, engine: str | None, expected: TrainingCommand
) -> None:
    command = read(text)
    assert (command.engine, command.training, command.script) == (engine, expected, None)


def test_a_framework_s_command_says_how_many_workers_it_would_start() -> None:
    command = read("trl sft --num_processes 4 --config x.yaml --num_machines=2")
    assert [fact.word for fact in command.stated] == ["--num_processes 4", "--num_machines=2"]
    assert [fact.word for fact in read("NPROC_PER_NODE=2 NNODES=2 swift sft").stated] == [
        "NPROC_PER_NODE=2",
        "NNODES=2",
    ]


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


def test_what_is_not_started_is_refused_with_a_line_that_works(golden: Golden) -> None:
    lines = (
        "python -O t.py",
        "python -Xfaulthandler t.py",
        "python -c pass",
        "python",
        "mpirun -np 4 -H a:2 python t.py --lr 1",
        "srun -N2 torchrun t.py",
        "docker run --gpus all image torchrun t.py",
        "sudo python t.py",
        "ray job submit -- python t.py",
        "torchx run dist.ddp --script t.py",
        "poetry run python t.py",
        "srun python t.py --token hf_s3cretS3CRETs3cret1",
        "numactl --membind 0 python t.py",
        "swift infer --model m",
        "axolotl preprocess x.yml",
        "trl env",
        "llamafactory-cli chat x.yaml",
        "accelerate test",
        "bash -c 'torchrun t.py'",
        "bash run.sh 2",
        "NGPU=4 ./run_train.sh",
        "env -i torchrun t.py",
        "uv run --with x python t.py",
        "conda run python t.py",
        "torchrun --nnodes 2",
        "A=1",
        "HF_TOKEN=hf_s3cretS3CRETs3cret1",
        "deepspeed --autotuning run t.py",
        "deepspeed --venv_script v t.py",
        "deepspeed -m pkg.train",
        "torchrun -z t.py",
        "torchrun x.yaml more",
    )
    golden.check_errors(
        "refused_commands",
        {line: error_of(read, line) for line in lines}
        | {"torchrun t.py, --engine deepspeed": error_of(read, "torchrun t.py", "deepspeed")},
    )


def test_a_command_of_the_engine_is_read() -> None:
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


def test_a_size_that_contradicts_the_hostfile_is_refused_with_what_to_type(golden: Golden) -> None:
    lines = (
        "torchrun --nnodes=3 t.py",
        "torchrun --nnodes=x t.py",
        "torchrun --nproc-per-node=8 t.py",
        "torchrun --nproc-per-node=1 t.py",
        "deepspeed --num_gpus 8 t.py",
        "accelerate launch --num_processes 8 t.py",
        "accelerate launch --num_processes 3 t.py",
        "CUDA_VISIBLE_DEVICES=0 torchrun t.py",
        "torchrun --nproc-per-node=many t.py",
    )
    unequal = parse_hostfile("a gpus=6,7\nb gpus=0,1\n", "hosts")
    visible = "CUDA_VISIBLE_DEVICES=6,7 python t.py"
    golden.check_errors(
        "refused_sizes",
        {line: error_of(settle, read(line), TWO) for line in lines}
        | {visible: error_of(settle, read(visible), unequal)},
    )


def test_our_own_options_win_over_a_command() -> None:
    command = read("torchrun --nnodes=3 --nproc-per-node=8 t.py")
    assert settle(command, TWO, nodes=1, workers=1) == Settled(1, {}, ("--nnodes=3",))


def test_gpus_of_the_hostfile_stand_for_those_of_a_command() -> None:
    command = read("A=1 CUDA_VISIBLE_DEVICES=6,7 torchrun --nproc_per_node=2 t.py")
    cluster = parse_hostfile("a gpus=6,7\nb gpus=6,7\n", "hosts")
    assert settle(command, cluster) == Settled(None, {"A": "1"}, ())
    assert settle(command, TWO).env == {"A": "1", "CUDA_VISIBLE_DEVICES": "6,7"}
    assert settle(read("accelerate launch --gpu_ids 6,7 t.py"), SILENT).env == {"CUDA_VISIBLE_DEVICES": "6,7"}


@pytest.mark.parametrize("word", ["train.py", "./a/train.py", "run.sh", "torchrun", "python3.11", "accelerate", "srun"])
def test_a_program_in_the_place_of_a_yaml_is_recognised(word: str) -> None:
    assert starts_program(word)
    assert not starts_program("train.yaml")
    assert not starts_program("learning_rate=1")
