# ruff: noqa: E501 - commands stand here as they are run
"""Runs programs and trainings that end well, or fail of something of their own, and keeps the ends of what they print.

`tests/diagnose/unrelated.jsonl` has them, at most three of a program: no error of the catalogue may be found in one. Run it
anew after a change here; a program that is not installed is left out. It takes some minutes.

    python scripts/make_unrelated_logs.py [PROGRAM...]     (default: all; else these, and the others stay)
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent
_OUT = _ROOT / "tests" / "launch" / "unrelated.jsonl"
_LINES, _CHARS = 40, 3000
_TIMEOUT_S = 300
_MOST = 3
_PYTHON = sys.executable
_BIN = Path(_PYTHON).parent

# Names of libraries, errors and hosts in ordinary text, as trainings print them.
_TALK = (
    "print('backend: nccl, fallback gloo; NCCL_DEBUG=WARN; error feedback on; timeout 1800 s; connection pool 8')\n"
    "print('[c10d] store ready, TCPStore on 29500; no error; memory 12 GiB; killed 0 stale processes')\n"
)
_TRAIN = """
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
{talk}
model = {model}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(30):
    x, y = {batch}
    loss = {loss}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {{step}} of 30: loss {{loss.item():.4f}}, grad error feedback 0.0, nccl time 0 ms", flush=True)
{end}
"""
_MLP = "torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))"
_PAIR = "(torch.randn(16, 8), torch.randn(16, 1))"
_MSE = "torch.nn.functional.mse_loss(model(x), y)"


def _train(
    *, model: str = _MLP, batch: str = _PAIR, loss: str = _MSE, end: str = "print('training is over')"
) -> list[str]:
    return _python(_TRAIN.format(talk=_TALK, model=model, batch=batch, loss=loss, end=end))


def _python(source: str) -> list[str]:
    return [_PYTHON, "-c", source]


def _module(*words: str) -> list[str]:
    return [_PYTHON, "-m", *words]


def _tool(name: str, *words: str) -> list[str]:
    return [str(_BIN / name), *words]


def _shell(text: str) -> list[str]:
    return ["bash", "-c", text]


_CLASSES = "torch.nn.functional.cross_entropy(model(x), y)"
_TRAININGS: dict[str, list[list[str]]] = {
    "train mlp": [_train(), _train(end="raise SystemExit('validation loss is above the limit of 0.1')")],
    "train shapes": [
        _train(batch="(torch.randn(16, 9), torch.randn(16, 1))"),
        _train(model="torch.nn.Conv2d(3, 8, 3)", batch="(torch.randn(2, 4, 9, 9), torch.randn(2, 8, 7, 7))"),
    ],
    "train nan": [
        _train(end="assert loss.isnan(), 'the loss is finite'"),
        _train(end="raise ValueError('loss is nan')"),
    ],
    "train dtype": [
        _train(batch="(torch.randn(16, 8).double(), torch.randn(16, 1))"),
        _train(batch="(torch.randint(5, (16, 8)), torch.randn(16, 1))"),
    ],
    "train labels": [
        _train(model="torch.nn.Linear(8, 3)", batch="(torch.randn(4, 8), torch.tensor([0, 1, 2, 3]))", loss=_CLASSES),
        _train(model="torch.nn.Linear(8, 3)", batch="(torch.randn(4, 8), torch.rand(4))", loss=_CLASSES),
    ],
    "train embedding": [
        _train(
            model="torch.nn.Embedding(10, 4)",
            batch="(torch.tensor([1, 11]), torch.randn(2, 4))",
        ),
        _train(model="torch.nn.Embedding(10, 4)", batch="(torch.tensor([1, 9]), torch.randn(2, 4))"),
    ],
    "train lstm": [
        _train(
            model="torch.nn.LSTM(4, 5)",
            batch="(torch.randn(6, 2, 4), torch.randn(6, 2, 5))",
            loss="torch.nn.functional.mse_loss(model(x)[0], y)",
        )
    ],
    "train transformer": [
        _train(
            model="torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)",
            batch="(torch.randn(2, 5, 8), torch.randn(2, 5, 8))",
        ),
        _python("import torch\ntorch.nn.MultiheadAttention(10, 3)\n"),
    ],
    "train graph": [
        _train(end="loss.backward()"),
        _python("import torch\nx = torch.ones(3, requires_grad=True)\n(x * 2).backward()\n"),
    ],
    "train optimizer": [
        _python("import torch\ntorch.optim.SGD([], lr=0.1)\n"),
        _python("import torch\ntorch.optim.Adam(torch.nn.Linear(1, 1).parameters(), lr=-1)\n"),
    ],
    "train checkpoint": [
        _python(
            "import torch\nm = torch.nn.Linear(2, 2)\ntorch.save(m.state_dict(), 'm.pt')\n"
            "print(torch.nn.Linear(2, 2).load_state_dict(torch.load('m.pt')))\n"
        ),
        _python("import torch\ntorch.nn.Linear(2, 2).load_state_dict({'gloo': torch.ones(1)})\n"),
    ],
    "train loader": [
        _python(
            "import torch\nclass Data(torch.utils.data.Dataset):\n    def __len__(self):\n        return 4\n"
            "    def __getitem__(self, i):\n        raise ValueError(f'row {i} has no nccl column')\n"
            "list(torch.utils.data.DataLoader(Data(), num_workers=1))\n"
        ),
        _python("import torch\nprint(list(torch.utils.data.DataLoader(torch.arange(6.0), batch_size=4)))\n" + _TALK),
        _python("import torch\ntorch.utils.data.DataLoader([], batch_size=0)\n"),
    ],
    "train gloo alone": [
        _python(
            "import os, torch.distributed as dist\n"
            "os.environ.update(RANK='0', WORLD_SIZE='1', MASTER_ADDR='127.0.0.1', MASTER_PORT='29731')\n"
            "dist.init_process_group('gloo')\nprint('process group: gloo, rank 0 of 1, backend nccl not used')\n"
            "dist.barrier()\ndist.destroy_process_group()\nprint('over')\n"
        ),
        _python(
            "import os, torch.distributed as dist\n"
            "os.environ.update(RANK='0', WORLD_SIZE='1', MASTER_ADDR='127.0.0.1', MASTER_PORT='29732')\n"
            "dist.init_process_group('gloo')\nraise ValueError('unknown option backend=gloo2 of nccl_opts')\n"
        ),
    ],
    "torchrun": [
        _module("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "ok.py"),
        _module("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "bad.py"),
        _module("torch.distributed.run", "--help"),
    ],
    "torch compile": [
        _python("import torch\nprint(torch.__config__.show())\n"),
        _python("import torch\nprint(torch.jit.script(torch.nn.ReLU()).code)\ntorch.jit.script(lambda x: x)\n"),
    ],
    "torch linalg": [
        _python("import torch\ntorch.linalg.cholesky(-torch.eye(3))\n"),
        _python("import torch\ntorch.linalg.inv(torch.zeros(3, 3))\n"),
        _python("import torch\nprint(torch.linalg.svd(torch.ones(3, 3)))\n"),
    ],
    "transformers trainer": [
        _python(
            "import torch, transformers as t\n"
            "c = t.Qwen2Config(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,"
            " num_attention_heads=2, num_key_value_heads=2)\n"
            "rows = [{'input_ids': torch.arange(8), 'labels': torch.arange(8)}] * 8\n"
            "a = t.TrainingArguments('out', max_steps=3, report_to=[], use_cpu=True, logging_steps=1, save_strategy='no')\n"
            "t.Trainer(t.Qwen2ForCausalLM(c), a, train_dataset=rows).train()\n"
        ),
        _python(
            "import torch, transformers as t\n"
            "c = t.Qwen2Config(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,"
            " num_attention_heads=2, num_key_value_heads=2)\n"
            "a = t.TrainingArguments('out', max_steps=3, report_to=[], use_cpu=True)\n"
            "t.Trainer(t.Qwen2ForCausalLM(c), a, train_dataset=[{'input_ids': torch.arange(8)}] * 8).train()\n"
        ),
        _python("import transformers as t\nt.TrainingArguments('out', eval_strategy='never')\n"),
    ],
    "transformers config": [
        _python("import transformers as t\nprint(t.Qwen2Config())\n"),
        _python("import transformers as t\nt.Qwen2Config(hidden_size=-1, num_attention_heads='x').to_dict()['nccl']\n"),
    ],
    "accelerate": [
        _tool("accelerate", "env"),
        _tool("accelerate", "launch", "--cpu", "ok.py"),
        _tool("accelerate", "x"),
    ],
    "deepspeed": [_tool("deepspeed", "--help"), _tool("ds_report"), _tool("deepspeed", "--num_gpus=x", "ok.py")],
    "llamafactory-cli": [
        _tool("llamafactory-cli", "version"),
        _tool("llamafactory-cli", "env"),
        _tool("llamafactory-cli", "help"),
    ],
    "peft": [
        _python("import peft\npeft.LoraConfig(r=0).to_dict()\npeft.get_peft_model(None, peft.LoraConfig(r=0))\n"),
        _python("import peft\nprint(peft.LoraConfig(r=8, target_modules=['nccl']))\n"),
    ],
    "datasets": [
        _python(
            "import datasets\nprint(datasets.Dataset.from_dict({'gloo': [1, 2]}).map(lambda r: {'n': r['gloo'] + 1}))\n"
        ),
        _python("import datasets\ndatasets.Dataset.from_dict({'a': [1, 2], 'b': [1]})\n"),
        _python("import datasets\ndatasets.Dataset.from_dict({'a': [1, 2]}).select_columns('nccl')\n"),
    ],
    "tokenizers": [
        _python("from tokenizers import Tokenizer, models\nprint(Tokenizer(models.BPE()).to_str(pretty=True))\n"),
        _python("from tokenizers import Tokenizer\nTokenizer.from_str('{}')\n"),
    ],
    "ttx": [_tool("ttx", "--help"), _tool("ttx", "ok.py")],
    "tensorboard": [_tool("tensorboard", "--version"), _tool("tensorboard", "--nccl")],
    "mlflow": [_tool("mlflow", "--version"), _tool("mlflow", "runs", "list")],
}
_PYTHON_PROGRAMS: dict[str, list[list[str]]] = {
    "python exceptions": [
        _python("import sys\ndef load(rank):\n    return {}['gloo_timeout']\nload(0)\n"),
        _python("def f(n):\n    return f(n + 1)\nf(0)\n"),
        _python("print(dir(__builtins__))\n" + _TALK),
    ],
    "python types": [
        _python("len(3) + 'nccl'\n"),
        _python("int('error 111')\n"),
        _python("class Rank:\n    pass\nRank().nccl_communicator\n"),
    ],
    "python chained": [
        _python(
            "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise RuntimeError('rank 3 of 8 has no samples') from e\n"
        ),
        _python(
            "import asyncio\nasync def f():\n    raise LookupError('peer is not in the table')\nasyncio.run(f())\n"
        ),
        _python("import concurrent.futures as c\nc.ThreadPoolExecutor().submit(lambda: [][1]).result()\n"),
    ],
    "python logging": [
        _python(
            "import logging\nlogging.basicConfig(level=0)\nlog = logging.getLogger('nccl.gloo')\n"
            "log.error('step 3: no error, retry of the connection is off')\nlog.critical('memory is at 93 %')\n"
        ),
        _python("import warnings\nwarnings.warn('the gloo backend is slower than nccl')\nprint('end')\n"),
    ],
    "python syntax": [_python("def f(:\n"), _python("print('a'\n"), _python("  x = 1\n y = 2\n")],
    "python exit": [
        _python("import sys\nprint('Error: dataset has 0 rows after filtering')\nsys.exit(1)\n"),
        _python("import sys\nsys.exit('error: nccl is no engine; one of: torch, accelerate')\n"),
    ],
    "unittest": [_module("unittest", "-v", "tests_here"), _module("unittest", "--help"), _module("unittest", "ok")],
    "json.tool": [
        _shell(f"echo '{{\"nccl\": 1' | {_PYTHON} -m json.tool"),
        _shell(f"echo '[1]' | {_PYTHON} -m json.tool"),
    ],
    "ast": [_module("ast", "ok.py"), _shell(f"echo 'a b' | {_PYTHON} -m ast")],
    "dis": [_module("dis", "ok.py")],
    "tokenize": [_module("tokenize", "ok.py")],
    "timeit": [_module("timeit", "-n", "10", "sum(range(10))"), _module("timeit", "nccl + 1")],
    "cProfile": [_module("cProfile", "ok.py")],
    "compileall": [_module("compileall", "."), _module("compileall", "syntax.py")],
    "doctest": [_module("doctest", "-v", "ok.py"), _module("doctest", "documented.py")],
    "trace": [_module("trace", "--count", "--summary", "ok.py")],
    "calendar": [_module("calendar", "2026", "2"), _module("calendar", "x")],
    "zipfile": [_module("zipfile", "-l", "ok.py"), _module("zipfile")],
    "tarfile": [_module("tarfile", "-l", "ok.py")],
    "sysconfig": [_module("sysconfig")],
    "pip": [_module("pip", "list"), _module("pip", "check"), _module("pip", "frobnicate")],
    "venv": [_module("venv", "--help")],
    "argparse": [
        _python(
            "import argparse\np = argparse.ArgumentParser()\np.add_argument('--backend', choices=['nccl'])\np.parse_args(['--backend', 'gloo'])\n"
        )
    ],
    "sqlite3 module": [
        _python("import sqlite3\nsqlite3.connect(':memory:').execute('select nccl from gloo')\n"),
        _python(
            "import sqlite3\nc = sqlite3.connect(':memory:')\nc.execute('create table t (a unique)')\nfor _ in 'ab':\n    c.execute('insert into t values (1)')\n"
        ),
    ],
    "subprocess": [
        _python("import subprocess\nsubprocess.run(['false'], check=True)\n"),
        _python("import subprocess\nprint(subprocess.run(['echo', 'NCCL'], capture_output=True))\n"),
    ],
    "multiprocessing": [
        _python("import multiprocessing as m\ndef f(i):\n    return 1 // i\nprint(m.Pool(2).map(f, [2, 0]))\n"),
    ],
    "numpy": [
        _python("import numpy as n\nn.ones(3) @ n.ones(4)\n"),
        _python("import numpy as n\nn.show_config()\n"),
        _python("import numpy as n\nprint(n.log(n.array([0.0, -1.0])))\n"),
    ],
    "pandas": [
        _python("import pandas\npandas.DataFrame({'a': [1]})['nccl']\n"),
        _python("import pandas\npandas.DataFrame({'a': [1, 2], 'b': [1]})\n"),
        _python("import pandas\nprint(pandas.DataFrame({'backend': ['nccl', 'gloo'], 'errors': [0, 1]}).describe())\n"),
    ],
    "scipy": [
        _python("import scipy.optimize as o\nprint(o.minimize(lambda x: (x - 1) ** 2, 0.0))\n"),
        _python("import scipy.linalg as l\nl.solve([[1, 1], [1, 1]], [1, 2])\n"),
    ],
    "matplotlib": [
        _python("import matplotlib\nmatplotlib.use('Agg')\nimport matplotlib.pyplot as p\np.plot([1, 2], [1])\n")
    ],
    "pillow": [
        _python("from PIL import Image\nImage.open('ok.py')\n"),
        _python("from PIL import features\nfeatures.pilinfo()\n"),
    ],
    "sympy": [_python("import sympy\nprint(sympy.solve('x**2 - 2'))\nsympy.sympify('1 +')\n")],
    "networkx": [_python("import networkx as n\nn.shortest_path(n.path_graph(3), 0, 9)\n")],
    "yaml": [
        _python("import yaml\nyaml.safe_load('a: [1, 2\\nb: nccl')\n"),
        _python("import yaml\nprint(yaml.safe_load('a: 1'))\n"),
    ],
    "pydantic": [
        _python("import pydantic\nclass M(pydantic.BaseModel):\n    ranks: int\nM(ranks='gloo')\n"),
    ],
    "msgspec": [_python("import msgspec\nmsgspec.json.decode(b'{\"a\": }')\n")],
    "httpx": [_tool("httpx", "--help"), _python("import httpx\nhttpx.get('nccl://x')\n")],
    "click typer": [_tool("typer", "--help"), _tool("typer", "ok.py", "run", "--nccl")],
    "rich": [_module("rich.progress"), _module("rich.table")],
    "pygments": [_tool("pygmentize", "-L", "styles"), _tool("pygmentize", "-l", "nccl", "ok.py")],
    "markdown": [_tool("markdown_py", "text.md")],
    "sqlparse": [_tool("sqlformat", "--help"), _shell(f"echo 'select 1' | {_BIN}/sqlformat -")],
    "ruff": [
        _tool("ruff", "check", "--select", "ALL", "bad.py"),
        _tool("ruff", "check", "syntax.py"),
        _tool("ruff", "format", "--diff", "ok.py"),
    ],
    "mypy": [_tool("mypy", "--strict", "bad.py"), _tool("mypy", "ok.py"), _tool("mypy", "--nccl")],
    "pytest": [
        _tool("pytest", "-p", "no:cacheprovider", "-p", "no:randomly", "tests_here.py"),
        _tool("pytest", "--version"),
        _tool("pytest", "--nccl"),
    ],
    "coverage": [_tool("coverage", "run", "ok.py"), _tool("coverage", "report"), _tool("coverage", "x")],
    "hypothesis": [
        _tool("hypothesis", "--help"),
        _python(
            "from hypothesis import given, strategies as s\n@given(s.integers())\ndef f(n):\n    assert n < 100\nf()\n"
        ),
    ],
    "mkdocs": [_tool("mkdocs", "--version"), _tool("mkdocs", "build")],
    "hatchling": [_tool("hatchling", "--help"), _tool("hatchling", "build")],
    "ninja": [_tool("ninja", "--version"), _tool("ninja", "-C", ".")],
    "fab": [_tool("fab", "--version"), _tool("fab", "nccl")],
    "lint-imports": [_tool("lint-imports", "--help"), _tool("lint-imports")],
    "torchfrtrace": [_tool("torchfrtrace", "--help")],
    "hf": [_tool("hf", "--help"), _tool("hf", "version"), _tool("hf", "nccl")],
    "modelscope": [_tool("modelscope", "--help")],
    "uvicorn": [_tool("uvicorn", "--help"), _tool("uvicorn", "--nccl")],
    "multinode": [_tool("multinode", "--help"), _tool("multinode", "launch"), _tool("multinode", "predict", "--help")],
}
_SYSTEM: dict[str, list[list[str]]] = {
    "git": [["git", "status"], ["git", "log", "--oneline", "nccl"], ["git", "frobnicate"]],
    "git merge": [
        _shell(
            "git init -q r && cd r && git config user.email a@b && git config user.name a && echo 1 > f && git add f && "
            "git commit -qm one && git checkout -qb other && echo 2 > f && git commit -qam two && git checkout -q - && "
            "echo 3 > f && git commit -qam three; git merge other; git status"
        )
    ],
    "ssh": [["ssh", "-V"], ["ssh", "-Q", "cipher"], ["ssh", "-o", "Nccl=1", "host"]],
    "ssh-keygen": [
        _shell("ssh-keygen -q -t ed25519 -N '' -f k && ssh-keygen -l -f k"),
        ["ssh-keygen", "-l", "-f", "ok.py"],
    ],
    "sqlite3": [
        ["sqlite3", ":memory:", "select * from nccl"],
        ["sqlite3", ":memory:", "selec 1"],
        ["sqlite3", ":memory:", ".help"],
    ],
    "gcc": [["gcc", "bad.c"], ["gcc", "-Wall", "-o", "ok", "ok.c"], ["gcc", "link.c"]],
    "gcc header": [["gcc", "header.c"]],
    "g++": [["g++", "-c", "bad.cc"], ["g++", "--version"]],
    "gdb": [["gdb", "--version"], ["gdb", "-batch", "-ex", "info nccl"]],
    "crash": [_shell("gcc -o s segv.c && ./s; echo code $?")],
    "assert": [_shell("gcc -o a assert.c && ./a; echo code $?")],
    "make": [["make", "-n", "-f", "Makefile"], ["make", "nccl"], ["make", "-f", "Makefile"]],
    "cmake": [["cmake", "--version"], ["cmake", "."]],
    "ld": [["ld", "--version"], ["ld", "-lnccl"]],
    "ar": [["ar", "t", "ok.py"]],
    "java": [["java", "-version"], ["java", "Nccl"]],
    "node": [["node", "-e", "null.gloo"], ["node", "-e", "console.log(process.versions)"], ["node", "-e", "nccl("]],
    "perl": [["perl", "-e", "die 'gloo is gone'"], ["perl", "-e", "use strict; $nccl = 1"], ["perl", "-v"]],
    "awk": [["awk", "BEGIN { print 1 / 0 }"], ["awk", "BEGIN { nccl( }"]],
    "sed": [["sed", "s/a"], ["sed", "--help"]],
    "grep": [["grep", "-E", "(", "ok.py"], ["grep", "-c", "print", "ok.py"]],
    "find": [["find", ".", "-name", "*.py"], ["find", ".", "-nccl"]],
    "sort": [["sort", "--nccl"], ["sort", "ok.py"]],
    "bc": [_shell("echo '1/0' | bc"), _shell("echo '2^64' | bc")],
    "jq": [_shell("echo '{\"a\": 1' | jq ."), _shell("echo '{\"a\": 1}' | jq '.b | error(\"nccl\")'")],
    "openssl": [["openssl", "version"], ["openssl", "x509", "-in", "ok.py"], ["openssl", "nccl"]],
    "tar": [["tar", "tf", "ok.py"], _shell("tar cf a.tar ok.py && tar tvf a.tar")],
    "gzip": [["gzip", "-t", "ok.py"], ["gzip", "--nccl"]],
    "xz": [["xz", "-t", "ok.py"], ["xz", "--info-memory"]],
    "zip": [_shell("zip a.zip ok.py && unzip -l a.zip"), ["unzip", "ok.py"]],
    "diff": [["diff", "ok.py", "bad.py"], ["diff", "--nccl"]],
    "patch": [_shell("diff -u ok.py bad.py > p; sed -i s/print/nccl/ ok.py; patch ok.py p")],
    "file": [["file", "ok.py", "ok.c"]],
    "curl": [["curl", "--version"], ["curl", "nccl://x"], ["curl", "-sS", "http://127.0.0.1:1/"]],
    "wget": [["wget", "--version"], ["wget", "http://127.0.0.1:1/"]],
    "apt": [["apt-cache", "policy", "bash"], ["apt-cache", "show", "nccl-gloo-x"]],
    "dpkg": [["dpkg", "-s", "nccl"], ["dpkg", "--version"]],
    "ip": [["ip", "addr", "show", "lo"], ["ip", "link", "show", "nccl0"], ["ip", "route", "get", "x"]],
    "ps": [["ps", "--version"], ["ps", "-o", "nccl"]],
    "df": [["df", "-h", "."], ["df", "--nccl"]],
    "bash": [_shell("set -u; echo $NCCL_NONE"), _shell("if then"), _shell("exit 3")],
    "dash": [["dash", "-c", "echo ${a"], ["dash", "-c", "test 1 -eq nccl"]],
    "tmux": [["tmux", "-V"], ["tmux", "attach", "-t", "nccl"]],
    "strace": [["strace", "-c", "true"], ["strace", "--nccl"]],
    "lsof": [["lsof", "-v"]],
    "sinfo": [["sinfo", "--version"], ["sinfo", "--nccl"]],
    "vim": [["vim", "--version"]],
}
_FILES = {
    "ok.py": "import sys\nprint('step 1 of 2: loss 0.5, gloo ready')\nprint('step 2 of 2: loss 0.4, nccl off')\n",
    "bad.py": "import os\ndef f(x: int) -> str:\n    return x\nraise ValueError('labels must be integers')\n",
    "syntax.py": "def f(:\n",
    "documented.py": '"""\n>>> 1 + 1\n3\n"""\n',
    "tests_here.py": (
        "import unittest\nclass T(unittest.TestCase):\n    def test_nccl(self):\n        self.assertEqual(1, 2, 'ranks differ')\n"
        "    def test_gloo(self):\n        self.assertTrue(True)\n    def test_error(self):\n        {}['rank']\n"
    ),
    "text.md": "# NCCL errors\n\nA `gloo` timeout, *killed*.\n",
    "bad.c": "int main(void) { return nccl; }\n",
    "ok.c": '#include <stdio.h>\nint main(void) { int x; printf("gloo\\n"); return 0; }\n',
    "link.c": "int nccl(void);\nint main(void) { return nccl(); }\n",
    "header.c": "#include <nccl_gloo.h>\nint main(void) { return 0; }\n",
    "segv.c": "int main(void) { int *p = 0; return *p; }\n",
    "assert.c": "#include <assert.h>\nint main(void) { int ranks = 3; assert(ranks == 4); return 0; }\n",
    "bad.cc": '#include <vector>\nint main() { std::vector<int> v = "nccl"; }\n',
    "Makefile": "all: a\n\t@echo linking nccl\n\t@false\na:\n\t@echo gloo\n",
    "CMakeLists.txt": 'cmake_minimum_required(VERSION 3.5)\nproject(x NONE)\nmessage(FATAL_ERROR "nccl is off")\n',
}


def main() -> int:
    """Run them, and write what they printed."""
    wanted = set(sys.argv[1:])
    programs = {name: commands for part in (_SYSTEM, _PYTHON_PROGRAMS, _TRAININGS) for name, commands in part.items()}
    cases = [
        (program, argv)
        for program, commands in programs.items()
        for argv in commands[:_MOST]
        if shutil.which(argv[0]) is not None and (not wanted or program in wanted)
    ]
    kept = [json.loads(line) for line in _OUT.read_text().splitlines()] if wanted else []
    kept = [record for record in kept if record["program"] in programs and record["program"] not in wanted]
    records = sorted([*kept, *_run_all(cases)], key=lambda record: list(programs).index(record["program"]))
    _OUT.write_text("".join(json.dumps(record, sort_keys=True) + "\n" for record in records))
    failed = sum(bool(record["exit_code"]) for record in records)
    print(f"{len(records)} logs of {len(Counter(one['program'] for one in records))} programs, {failed} failed: {_OUT}")
    return 0


def _run_all(cases: list[tuple[str, list[str]]]) -> Iterator[dict[str, Any]]:
    for program, argv in cases:
        with tempfile.TemporaryDirectory() as folder:
            for name, text in _FILES.items():
                (Path(folder) / name).write_text(text)
            output, code = _run(argv, folder)
        if output.strip():
            print(f"{program}: exit code {code}", flush=True)
            yield {"program": program, "exit_code": code, "tail": _scrub(output, folder)}


def _run(argv: list[str], folder: str) -> tuple[str, int | None]:
    env = {
        **{name: value for name, value in os.environ.items() if name in {"LANG", "LC_ALL"}},
        "PATH": f"{_BIN}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": folder,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    try:
        done = subprocess.run(
            argv,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(errors="replace"), None
    return done.stdout.decode(errors="replace"), done.returncode


def _scrub(text: str, folder: str) -> str:
    """The end of it, without the names of this machine."""
    names = {folder: "/job", str(_BIN.parent): "/env", str(_ROOT): "/src", socket.gethostname(): "host"}
    for name, stands_for in names.items():
        text = text.replace(name, stands_for)
    text = re.sub(r"https?://[\w.:/-]+|/work/[\w./-]+", "URL", text)
    return "\n".join(text.splitlines()[-_LINES:])[-_CHARS:]


if __name__ == "__main__":
    sys.exit(main())
