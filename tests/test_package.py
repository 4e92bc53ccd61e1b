"""The built package: it builds from the files of its own sdist, and has what an installed multinode needs."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SAMPLES = ("configs", "hostfiles")
DEADLINE_S = 120


def build(target: str, source: Path, into: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(into)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=DEADLINE_S)
    (built,) = into.glob({"sdist": "*.tar.gz", "wheel": "*.whl"}[target])
    return built


def files_below(folder: Path) -> set[str]:
    found = {path.relative_to(ROOT) for path in folder.rglob("*") if path.is_file()}
    return {path.as_posix() for path in found if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from what is in the sdist alone, unpacked."""
    place = tmp_path_factory.mktemp("package")
    with tarfile.open(build("sdist", ROOT, place / "dist")) as sdist:
        sdist.extractall(place / "sdist", filter="data")
    (source,) = (place / "sdist").iterdir()
    with zipfile.ZipFile(build("wheel", source, place / "dist")) as archive:
        archive.extractall(place / "wheel")  # noqa: S202
    return place / "wheel"


def test_the_wheel_has_the_package_and_the_samples_and_nothing_else(wheel: Path) -> None:
    samples = {name for folder in SAMPLES for name in files_below(ROOT / folder)} | {"scripts/make_tiny.py"}
    wanted = files_below(ROOT / "multinode") | {f"multinode/example/{name}" for name in samples}
    found = {path.relative_to(wheel) for path in wheel.rglob("*") if path.is_file()}
    assert {path.as_posix() for path in found if not path.parts[0].endswith(".dist-info")} == wanted
    assert "multinode/py.typed" in wanted


def test_what_is_large_is_an_extra(wheel: Path) -> None:
    (path,) = wheel.glob("*.dist-info/METADATA")
    metadata = Parser().parsestr(path.read_text())
    needed = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert not [text for text in needed if text.startswith(("plotly", "torch", "llamafactory"))]
    assert "plotly<8,>=6.0.0; extra == 'report'" in metadata.get_all("Requires-Dist", [])
    assert metadata["Requires-Python"] == ">=3.11"


def imported_modules(source: str) -> Iterator[str]:
    """The top-level modules that a source file imports by their full names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).partition(".")[0]


def normal_name(text: str) -> str:
    return re.split(r"[^\w.-]", text)[0].lower().replace("_", "-")


def test_every_package_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [need for name, needs in project["optional-dependencies"].items() if name != "dev" for need in needs]
    declared = {normal_name(need) for need in [*project["dependencies"], *extras]}
    sources = [path.read_text() for path in (ROOT / "multinode").rglob("*.py")]
    modules = {module for source in sources for module in imported_modules(source)}
    distributions = importlib.metadata.packages_distributions()
    # A module whose distribution is not installed here has its name.
    undeclared = {
        module
        for module in modules - sys.stdlib_module_names - {"multinode"}
        if not declared & {normal_name(name) for name in distributions.get(module, [module])}
    }
    assert undeclared == set()


def test_the_samples_come_out_of_the_wheel_as_they_are_here(wheel: Path, tmp_path: Path) -> None:
    # With the wheel before the repository on the path.
    program = "import sys; sys.path.insert(0, sys.argv.pop(1)); from multinode.cli.main import run; run()"
    done = subprocess.run(
        # -B: it leaves nothing in the wheel that another test lists.
        [sys.executable, "-B", "-c", program, str(wheel), "init", "--example", "--json", "-o", "mine"],
        cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=True,
    )  # fmt: skip
    files = json.loads(done.stdout)["files"]
    assert "mine/configs/default.yaml" in files
    assert "mine/scripts/make_tiny.py" in files
    copied = {name.removeprefix("mine/"): (tmp_path / name).read_bytes() for name in files}
    assert copied == {name: (ROOT / name).read_bytes() for name in copied}
    assert copied.keys() == {name for folder in SAMPLES for name in files_below(ROOT / folder)} | {
        "scripts/make_tiny.py"
    }


# Prints the files of ours that a command has imported; without SSH, which this machine need not have.
_IMPORTS = """
import contextlib, io, sys
from multinode import api
from multinode.cli.main import run
if "--dry-run" not in sys.argv:
    connect = api.connect
    vars(api)["connect"] = lambda cluster, **_: connect(cluster, local=True)
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    run()
print(*(name for name in sys.modules if name.partition(".")[0] == "multinode"), sep="\\n")
"""


def modules_of(folder: Path, *words: str) -> set[str]:
    """The modules of ours that `multinode launch` imports with these arguments."""
    (folder / "train.py").write_text("print('step')\n")
    (folder / "hosts.txt").write_text(f"127.0.0.1 slots=2 python={sys.executable}\n")
    command = [sys.executable, "-c", _IMPORTS, "launch", "--hosts", "hosts.txt", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return set(done.stdout.split())


def count_lines(modules: set[str]) -> int:
    paths = [ROOT / name.replace(".", "/") for name in modules]
    files = [path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in paths]
    return sum(file.read_text().count("\n") for file in files)


def test_a_launch_imports_neither_the_lab_nor_comparisons_nor_without_checks_their_rules(tmp_path: Path) -> None:
    run = modules_of(tmp_path, "--no-check", "--", "train.py")
    checked = modules_of(tmp_path, "--", "train.py")
    plan_of_yaml = modules_of(tmp_path, "--dry-run", str(ROOT / "configs/tiny_sft.yaml"))
    plan_of_script = modules_of(tmp_path, "--dry-run", "--", "train.py")
    for modules in (run, checked, plan_of_yaml, plan_of_script):
        folders = {each.split(".")[1] for each in modules if "." in each}
        assert not folders & {"lab", "tables", "tune", "sweep", "series", "contrast", "bench"}
    assert {each for each in run if each.startswith("multinode.check")} == {"multinode.check", "multinode.check.probe"}
    assert "multinode.check.ports" in checked
    assert "multinode.job.restrictions" not in checked
    assert not [each for each in plan_of_yaml if each.startswith("multinode.profile")]
    # Of which the reading of commands is 840, what makes a record of the wire harmless and typed 120, StoredRun,
    # which a prepared launch is, 360, what draws an answer 90, figures and their declarations 410, rules of what a
    # summary finds 280, the question about a model's tensors 15, a worker's last collectives 15, what a strategy says
    # of itself 80, what is known of frameworks 330, and whether a training fits the memory 100.
    assert count_lines(run) <= 25_400
    assert count_lines(checked) <= 30_470


def test_a_launch_imports_the_framework_that_its_command_names_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("model_name_or_path: m\ndataset_name: d\n")
    commands = {
        "script": ("train.py",),
        "trainer": ("train.py", "--bf16"),
        "trl": ("trl", "sft", "--config", "x.yaml"),
        "swift": ("swift", "sft", "--model", "m", "--dataset", "d"),
        "llamafactory": ("llamafactory-cli", "train", "--model_name_or_path", "m", "--dataset", "d"),
        "axolotl": ("accelerate", "launch", "-m", "axolotl.cli.train", "x.yaml"),
    }
    folder = "multinode.job.frameworks."
    for name, command in commands.items():
        modules = modules_of(tmp_path, "--dry-run", "--", *command)
        found = {each.removeprefix(folder) for each in modules if each.startswith(folder)} - {"framework"}
        # Whether its options are the Trainer's is seen in the script.
        assert found - {"script"} == {name} - {"script"}


# The word behind a command that installs or runs a package, or one with extras.
_INSTALLS = re.compile(
    r"\b(?:(?:pip3?|pipx|uv tool|uv pip) (?:install|inject|run)|uvx|uv add)(?: -\S+)* ['\"]?multinode(?![\w/.-])"
    r"|[^\w.]multinode\[\w"
)


@pytest.mark.parametrize(
    ("text", "proposes"),
    [
        ("pip install multinode", True),
        ("uv tool install 'multinode[report]'", True),
        ("needs `multinode[parquet]`", True),
        ("pip install 'multinode-launcher[report] @ git+https://repository.invalid/multinode'", False),
        ("python -m pip install -U multinode", True),
        ("pip install pyarrow", False),
    ],
)
def test_what_proposes_the_package_of_somebody_else_is_known(text: str, *, proposes: bool) -> None:
    assert bool(_INSTALLS.search(text)) is proposes


def test_no_text_of_ours_proposes_the_package_of_somebody_else() -> None:
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = [ROOT / name for name in files.split("\0") if name and name not in _OTHERS]
    texts = {str(path): path.read_bytes().decode(errors="replace") for path in paths if path.is_file()}
    assert [f"{name}: {found[0]}" for name, text in texts.items() if (found := _INSTALLS.search(text))] == []


# This file, and logs of other programs.
_OTHERS = {"tests/test_package.py", "tests/diagnose/unrelated.jsonl"}
