"""Commands as people paste them behind `--`: what a dry run makes of each, whole, in golden files."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from multinode.cli.main import build_app
from multinode.errors import MultinodeError
from tests.golden import Golden

SECRET = "hf_s3cretS3CRETs3cret1"
# A launcher and the options that its users write; `{}` is the program.
LAUNCHERS = {
    "torchrun": "torchrun --nnodes=2 --node-rank=0 --nproc-per-node=2 --master-addr=192.0.2.1 --max-restarts=2 {}",
    "torch.distributed.run": "python -m torch.distributed.run --standalone --nproc_per_node 2 {}",
    "torch.distributed.launch": "python3 -u -m torch.distributed.launch --nproc_per_node=2 {}",
    "accelerate": "accelerate launch --num_processes 4 --num_machines 2 --machine_rank 0 --mixed_precision bf16 {}",
    "accelerate-launch": "accelerate-launch --use_deepspeed --zero_stage 2 {}",
    "deepspeed": "deepspeed --num_nodes 2 --num_gpus 2 --master_port 29501 --no_local_rank {}",
    "ds": "ds --include localhost:0,1 {}",
    "llamafactory-cli": "llamafactory-cli train {}",
    "lmf": "lmf train {}",
    "python": "python {}",
    "python of a path": "/opt/venv/bin/python3.11 -u {}",
    "launcher of a path": "/opt/venv/bin/torchrun {}",
    "none": "{}",
}
PROGRAMS = {"script": "train.py --lr 1e-4", "module": "-m pkg.train --lr 1e-4", "yaml": "sft.yaml learning_rate=1e-4"}
FRONTS = {
    "variables": f"FORCE_TORCHRUN=1 NNODES=2 NODE_RANK=0 MASTER_PORT=29500 NCCL_DEBUG=WARN HF_TOKEN={SECRET} ",
    "wrappers": "nohup env CUDA_VISIBLE_DEVICES=6,7 time ",
    "environment": "conda run -n train ",
}
# Of every plan, whatever the command.
_USUAL = {"CUDA_DEVICE_ORDER", "MASTER_ADDR", "MASTER_PORT", "PYTHONUNBUFFERED", "NCCL_DEBUG_FILE"}
_RECORDS = re.compile(r"TORCH_(?:FR|NCCL)_\w+")
_CHANGING = re.compile(r"\d{8}-\d{6}-\w{4}|(?<=[=:])2\d{4}\b|(?<=--master-port )2\d{4}\b|(?<=main_process_port: )\d+")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with hostfiles and a YAML."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a addr=10.0.0.1 slots=2\nb addr=10.0.0.2 slots=2\n")
    (tmp_path / "silent").write_text("a addr=10.0.0.1\nb addr=10.0.0.2\n")
    (tmp_path / "sft.yaml").write_text("model_name_or_path: m\nstage: sft\n")
    (tmp_path / "config.yaml").write_text("distributed_type: FSDP\n")
    axolotl = tmp_path / "examples/llama-3/lora-1b.yml"
    axolotl.parent.mkdir(parents=True)
    axolotl.write_text("base_model: NousResearch/Llama-3.2-1B\nadapter: lora\n")
    return tmp_path


def outcome(command: str, *options: str, hosts: str = "hosts") -> str:
    """What a launch would start on node 0 and what it says; or how it is refused."""
    words = ["launch", "--hosts", hosts, *options, "--dry-run", "--json", "--", *shlex.split(command)]
    result = CliRunner().invoke(build_app(), words)
    lines = [f"$ {' '.join((*options, '--'))} {command}"]
    if result.exit_code:
        assert isinstance(result.exception, MultinodeError), result.exception
        lines.append(f"error: {result.exception.message}")
        lines += [f"hint: {result.exception.hint}"] if result.exception.hint else []
    else:
        plan = json.loads(result.stdout)
        node = plan["nodes"][0]
        env = {
            name: value
            for name, value in node["command"]["env"].items()
            if name not in _USUAL and not _RECORDS.fullmatch(name)
        }
        lines += [f"note: {line}" for line in result.stderr.splitlines()]
        lines += [f"  {name}={value}" for name, value in env.items() if (name, value) != ("NCCL_DEBUG", "INFO")]
        lines += [f"  setup: {node['command']['prelude']}"] if node["command"]["prelude"] else []
        lines.append(f"  {shlex.join(node['command']['argv'])}")
        lines += [
            f"  {file['path']}: {' | '.join(file['text'].splitlines())}"
            for file in node["files"]
            if file["path"].endswith(".yaml")
        ]
        assert plan["rendezvous"]["workers"] == [len(each["place"]["ranks"]) for each in plan["nodes"]]
        lines.append(f"  workers of each node: {len(node['place']['ranks'])}")
    return _CHANGING.sub("X", "\n".join(lines)) + "\n"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_starts_every_program(launcher: str, golden: Golden) -> None:
    commands = [
        *(LAUNCHERS[launcher].format(program) for program in PROGRAMS.values()),
        *(front + LAUNCHERS[launcher].format(PROGRAMS["script"]) for front in FRONTS.values()),
        f"{FRONTS['variables']}{LAUNCHERS[launcher].format(PROGRAMS['yaml'])}",
    ]
    texts = [outcome(command) for command in commands]
    assert "s3cret" not in "".join(text.partition("\n")[2] for text in texts)
    golden.check(f"pasted/{launcher.replace(' ', '-')}.txt", "\n".join(texts).replace(SECRET, "hf_..."))


@pytest.mark.usefixtures("folder")
def test_an_engine_that_was_asked_for_reads_the_options_of_its_launcher(golden: Golden) -> None:
    texts = [
        outcome("--num_processes 4 --num_machines 1 train.py", "--engine", "accelerate"),
        outcome("--num_processes 8 --num_machines 1 train.py", "--engine", "accelerate"),
        outcome("--num_gpus 2 train.py", "--engine", "deepspeed"),
        outcome("--num_gpus 8 train.py", "--engine", "deepspeed"),
        outcome("--nnodes=3 train.py"),
        outcome("--standalone train.py"),
        outcome("--nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=localhost:0 -m torchtitan.train"),
        outcome(
            "--nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=localhost:0 -m torchtitan.train", hosts="silent"
        ),
        outcome("--nproc-per-node=8 train.py", "--workers-per-node", "1"),
        outcome("torchrun train.py", "--engine", "exec"),
        outcome("torchrun train.py", "--engine", "deepspeed"),
        outcome("python train.py", "--engine", "deepspeed"),
        outcome("accelerate launch --config_file config.yaml train.py"),
        outcome(
            "llamafactory-cli train --stage sft --model_name_or_path m --bf16 --learning_rate 1e-4 --report_to a b"
        ),
    ]
    golden.check("pasted/engines.txt", "\n".join(texts))


# From READMEs, documentation and issues of these projects, with what stood for the reader's own names filled in.
PUBLIC = {
    "nanoGPT, README": [
        "torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py",
        "torchrun --nproc_per_node=8 --nnodes=2 --node_rank=0 --master_addr=123.45.12.34 --master_port=1234 train.py",
        "python train.py config/train_shakespeare_char.py --device=cpu --compile=False",
    ],
    "LLaMA-Factory, examples/README": [
        (
            "FORCE_TORCHRUN=1 NNODES=2 NODE_RANK=0 MASTER_ADDR=192.168.0.1 MASTER_PORT=29500 "
            "llamafactory-cli train sft.yaml"
        ),
        "CUDA_VISIBLE_DEVICES=0 llamafactory-cli train sft.yaml",
        "bash examples/lora_multi_gpu/multi_node.sh",
        "llamafactory-cli export examples/merge_lora/llama3_lora_sft.yaml",
    ],
    "torchtitan, run_train.sh": [
        (
            "PYTORCH_ALLOC_CONF=expandable_segments:True torchrun --nproc_per_node=8 --rdzv_backend c10d "
            "--rdzv_endpoint=localhost:0 --local-ranks-filter 0 --role rank --tee 3 -m torchtitan.train "
            "--module llama3 --config llama3_debugmodel"
        ),
        "NGPU=4 LOG_RANK=0,1 ./run_train.sh",
    ],
    "accelerate, documentation": [
        "accelerate launch --multi_gpu --num_processes=4 script.py --arg1",
        "accelerate launch --config_file config.yaml script.py --arg1",
    ],
    "DeepSpeed, getting started and issues 2612, 3624": [
        "deepspeed --hostfile=silent basic_deepspeed.py",
        "deepspeed --hostfile silent --include=work1:2,3 training.py",
        "deepspeed --num_nodes=2 train.py --deepspeed --deepspeed_config ds_config.json",
    ],
    "Megatron-LM, examples": [
        (
            "python -m torch.distributed.launch --nproc_per_node 8 --nnodes 1 --node_rank 0 --master_addr localhost "
            "--master_port 6000 pretrain_gpt.py --num-layers 24"
        ),
        "torchrun --nproc_per_node=8 --nnodes=1 pretrain_gpt.py",
    ],
    "ms-swift, examples/train/multi-node/swift": [
        (
            "CUDA_VISIBLE_DEVICES=0,1,2,3 NNODES=2 NODE_RANK=1 MASTER_ADDR=xxx.xxx.xxx.xxx NPROC_PER_NODE=4 swift sft "
            "--model Qwen/Qwen2.5-7B-Instruct --train_type lora"
        ),
    ],
    "axolotl, README and documentation": [
        "axolotl train examples/llama-3/lora-1b.yml",
        "accelerate launch -m axolotl.cli.train examples/llama-3/lora-1b.yml",
    ],
    "trl, README and documentation": [
        "trl sft --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name trl-lib/Capybara --output_dir out",
        "accelerate launch --config_file config.yaml trl/scripts/sft.py --model_name_or_path Qwen/Qwen2.5-0.5B",
    ],
    "vLLM, documentation": [
        "vllm serve m --tensor-parallel-size 8 --nnodes 2 --node-rank 1 --master-addr 192.168.1.100 --headless",
        "/opt/venv/bin/vllm serve m -tp 8 -n 3",
        "vllm bench serve --model m",
    ],
    "SGLang, documentation": [
        (
            "python3 -m sglang.launch_server --model-path m --tp 16 --dist-init-addr 172.16.4.52:20000 --nnodes 2 "
            "--node-rank 0"
        ),
    ],
    "PyTorch, examples/distributed/ddp-tutorial-series": [
        "torchrun --nnodes=2 --nproc_per_node=4 multinode.py 20 5",
    ],
}


@pytest.mark.usefixtures("folder")
def test_commands_of_public_pages_start_or_are_answered_with_one_that_does(golden: Golden) -> None:
    texts = {source: [outcome(command, hosts="silent") for command in commands] for source, commands in PUBLIC.items()}
    golden.check(
        "pasted/public.txt", "\n".join(f"# {source}\n\n{chr(10).join(some)}" for source, some in texts.items())
    )
    every = [text for some in texts.values() for text in some]
    refused = [text for text in every if "\nerror: " in text]
    assert (len(every), len(refused)) == (26, 5)
    # What is no training has no counterpart.
    assert [text for text in refused if "hint: " not in text and "it does not train a model" not in text] == []


@pytest.mark.usefixtures("folder")
def test_the_line_that_answers_a_command_works() -> None:
    for command in [command for commands in PUBLIC.values() for command in commands]:
        hint = re.search(r"hint: (?:.*: )?multinode (launch --hosts silent .*)", outcome(command, hosts="silent"))
        if hint is not None:
            result = CliRunner().invoke(build_app(), shlex.split(hint[1]))
            assert result.exit_code == 0, (hint[1], result.exception)


@pytest.mark.usefixtures("folder")
def test_every_verb_reads_a_command(golden: Golden) -> None:
    commands = ("bash run.sh", "torchrun --nnodes=3 t.py", "deepspeed --num_gpus 8 t.py")
    lines = [f"{verb} -- {words}" for verb in ("launch", "check", "contrast", "sweep", "tune") for words in commands]
    golden.check_errors(
        "refused_commands",
        {
            line: CliRunner().invoke(build_app(), line.replace("--", "--hosts hosts --", 1).split()).exception
            for line in lines
        },
    )


def test_the_hostfile_of_a_command_is_the_hostfile(folder: Path) -> None:
    (folder / "mine").write_text("c addr=10.0.0.3 slots=1\n")
    words = ["launch", "--dry-run", "--json", "--", "deepspeed", "--hostfile", "mine", "train.py"]
    result = CliRunner().invoke(build_app(), words)
    assert [node["place"]["node"] for node in json.loads(result.stdout)["nodes"]] == ["c"]
    assert "the hostfile overrides --hostfile mine" in result.stderr


def test_another_interpreter_than_that_of_the_hostfile_is_refused(folder: Path) -> None:
    (folder / "hosts").write_text("a addr=10.0.0.1 python=/other/python\n")
    assert "error: the command starts /opt/venv/bin/python, but hosts has python=/other/python" in outcome(
        "/opt/venv/bin/python train.py"
    )


@pytest.mark.usefixtures("folder")
def test_settings_follow_a_yaml_as_they_do_elsewhere() -> None:
    def config(*words: str) -> str:
        result = CliRunner().invoke(build_app(), ["launch", "--hosts", "hosts", "--dry-run", "--json", *words])
        assert result.exit_code == 0, result.exception
        text: str = json.loads(result.stdout)["nodes"][0]["files"][0]["text"]
        return text

    typed = config("sft.yaml", "learning_rate=1e-5", "bf16=true")
    assert typed == config("--set", "learning_rate=1e-5", "--set", "bf16=true", "sft.yaml")
    assert "bf16: true\nlearning_rate: 1.0e-05\n" in typed or "learning_rate: 1" in typed
    error = CliRunner().invoke(build_app(), ["launch", "--hosts", "hosts", "--dry-run", "sft.yaml", "more"]).exception
    assert isinstance(error, MultinodeError)
    assert error.message == "'more' after sft.yaml is not KEY=VALUE"
