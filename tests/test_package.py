"""The built package: it builds from the files of its own sdist, and has what an installed multinode needs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import zipfile
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


def test_a_launch_imports_neither_the_lab_nor_comparisons_nor_without_checks_their_rules() -> None:
    counted = subprocess.run(
        [sys.executable, ROOT / "scripts" / "count_imports.py", "--list"],
        check=True,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    ).stdout
    runs: dict[str, list[str]] = {}
    lines: dict[str, int] = {}
    name = ""
    for line in counted.splitlines():
        if line.startswith(" "):
            runs[name].append(line.split()[-1])
        else:
            name, _, sizes = line.partition(": ")
            runs[name], lines[name] = [], int(sizes.split()[0].replace(",", ""))
    for modules in runs.values():
        assert not [each for each in modules if re.match(r"multinode\.(lab|experiment|contrast|bench)\b", each)]
    assert [each for each in runs["run of a script"] if each.startswith("multinode.check")] == [
        "multinode.check",
        "multinode.check.probe",
    ]
    assert "multinode.check.ports" in runs["checked run of a script"]
    assert "multinode.job.restrictions" not in runs["checked run of a script"]
    assert lines["run of a script"] <= 20_300
    assert lines["checked run of a script"] < 25_100
    assert not [each for each in runs["plan of a YAML"] if each.startswith("multinode.profile")]
