"""The scripts, run for real with stand-ins for the programs that they call, which write down how they were called."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent
_SCRIPTS = (
    "scripts/setup",
    "scripts/test",
    "scripts/isolate",
    "scripts/check",
    "scripts/demo",
    "scripts/gpu-report",
    "scripts/make_pictures",
    "scripts/train-framework",
    "scripts/release-check",
    ".ci/run",
)

# Stands in for python3.11, for .venv/bin/python, and for the pip inside it.
_PYTHON = """\
#!/bin/bash
echo "python $*" >>"$CALLS"
case "$*" in
  "-c "*version_info*) exit "${TOO_OLD:-0}" ;;
  "-c import torch"*) echo "${TORCH:-cpu 2.13.0+cpu}" ;;
  --version) echo "Python ${VERSION:-3.11.9}" ;;
  "-m venv "*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
  "-m pip install "*) echo "${PIP_SAYS:-installed}"; exit "${PIP_FAILS:-0}" ;;
esac
"""
_MULTINODE = """\
#!/bin/bash
echo "multinode $*" >>"$CALLS"
case "$1 $2" in
  "lab up") exit "${UP_FAILS:-0}" ;;
  "launch --hosts") trap 'exit 130' INT; sleep "${LAUNCH_TAKES_S:-0}"; exit "${LAUNCH_FAILS:-0}" ;;
esac
"""
_SMI = '#!/bin/bash\nexit "${NO_GPU:-0}"\n'
# What setup itself calls, for a PATH on which there is nothing else.
_TOOLS = (
    "bash",
    "cat",
    "chmod",
    "cmp",
    "cp",
    "dirname",
    "env",
    "id",
    "mkdir",
    "mktemp",
    "mv",
    "rm",
    "sed",
    "tail",
    "touch",
)


class Checkout:
    """A checkout with the real scripts, and a PATH on which all else is a stand-in."""

    def __init__(self, root: Path) -> None:
        self.root = root / "check out"
        self.programs = root / "programs"
        self._calls = root / "calls"
        (self.root / "scripts").mkdir(parents=True)
        for name in ("setup", "demo", "test", "isolate", "gpu-report", "train-framework"):
            shutil.copy(_ROOT / "scripts" / name, self.root / "scripts" / name)
        (self.root / "pyproject.toml").write_text("[project]\n")
        self.lock = self.root / "requirements/lock.txt"
        self.lock.parent.mkdir()
        self.lock.touch()
        self.programs.mkdir()
        for name in ("ip", "sshd", "ssh", "nft", "nsenter", "apt-get"):
            self.add(name, f'#!/bin/bash\necho "{name} $*" >>"$CALLS"\n')
        self.add("nvidia-smi", _SMI)
        for name in ("python3.11", "python3.12", "python3.13", "python3"):
            self.add(name, _PYTHON)

    def add(self, name: str, text: str) -> None:
        path = self.programs / name
        path.write_text(text)
        path.chmod(0o755)

    def start(self, script: str, *args: str, **env: str) -> subprocess.Popen[str]:
        self._calls.write_text("")
        path = f"{self.programs}:/usr/bin:/bin"
        return subprocess.Popen(
            # Started from a background job, we would hand down that Ctrl-C is ignored.
            ["/usr/bin/env", "--default-signal=INT", self.root / script, *args],
            cwd="/",
            env={"PATH": path, "CALLS": str(self._calls), "NO_GPU": "1"} | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, script: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        process = self.start(script, *args, **env)
        stdout, stderr = process.communicate(timeout=30)
        return subprocess.CompletedProcess(script, process.returncode, stdout, stderr)

    def calls(self, program: str) -> list[str]:
        lines = self._calls.read_text().splitlines()
        return [line.removeprefix(f"{program} ") for line in lines if line.startswith(f"{program} ")]

    def installs(self) -> list[str]:
        return [call for call in self.calls("python") if call.startswith("-m pip install")]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.mark.parametrize("script", _SCRIPTS)
def test_a_script_can_be_run_and_stops_at_the_first_error(script: str) -> None:
    assert os.access(_ROOT / script, os.X_OK)
    assert "\nset -euo pipefail\n" in (_ROOT / script).read_text()
    subprocess.run(["bash", "-n", _ROOT / script], check=True, timeout=10)


def test_setup_without_a_gpu_installs_what_is_locked_and_then_pins_torch_beside_what_asks_for_it(
    checkout: Checkout,
) -> None:
    assert checkout.run("scripts/setup").returncode == 0
    [locked, rest] = checkout.installs()
    assert locked.endswith("--require-hashes --no-deps --requirement requirements/lock.txt")
    assert rest.endswith("-e .[dev,train] torch==2.13.0")


def test_setup_installs_what_the_tests_need_where_that_is_asked_for_and_missing(checkout: Checkout) -> None:
    for name in _TOOLS:
        (checkout.programs / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    alone = {"PATH": str(checkout.programs)}
    assert "chromium" not in checkout.run("scripts/setup", **alone).stdout
    done = checkout.run("scripts/setup", "--tests", **alone)
    # Who is not root is told the same command.
    assert (done.returncode, "apt-get install chromium" in done.stdout) == (0, True)
    if os.geteuid() == 0:
        wanted = "chromium fonts-liberation faketime g++ slurmctld slurmd slurm-client munge"
        assert checkout.calls("apt-get") == ["update", f"install -y --no-install-recommends {wanted}"]
    for name in ("chromium", "faketime", "g++", "srun", "slurmctld", "slurmd", "munged"):
        checkout.add(name, "#!/bin/bash\n")
    assert "apt-get" not in checkout.run("scripts/setup", "--tests", **alone).stdout


def test_what_the_tests_alone_need_is_installed_beside_the_environment_and_once(checkout: Checkout) -> None:
    assert checkout.run("scripts/setup").returncode == 0
    assert not (checkout.root / ".venv/wandb").exists()
    for _ in range(2):
        assert checkout.run("scripts/setup", "--tests", PIP_FAILS="1").returncode == 1
    done = checkout.run("scripts/setup", "--tests")
    assert (done.returncode, (checkout.root / ".venv/wandb").is_dir()) == (0, True)
    [install] = checkout.installs()
    assert "--target .venv/wandb.unfinished wandb" in install
    assert "scripts/compile_deepspeed.py" in checkout.calls("python")
    again = checkout.run("scripts/setup", "--tests")
    assert (again.returncode, again.stdout, checkout.installs()) == (0, "", [])
    assert "scripts/compile_deepspeed.py" not in checkout.calls("python")


def test_other_torches_are_installed_once_and_where_there_is_room(checkout: Checkout) -> None:
    checkout.add("df", '#!/bin/bash\nprintf "Avail\\n  %sG\\n" "${FREE_GB:-200}"\n')
    full = checkout.run("scripts/setup", "--thorough", FREE_GB="11")
    assert full.returncode == 0, full.stderr
    assert "no .venv/cuda: it takes up to 12 GB, and 11 are free" in full.stdout
    assert not [call for call in checkout.installs() if "torch==2.4.0" in call]
    done = checkout.run("scripts/setup", "--thorough")
    assert done.returncode == 0, done.stderr
    others = [call for call in checkout.installs() if "torch==2" in call]
    assert ["torch==2.4.0 numpy<2" in others[0], "torch==2.11.0 numpy" in others[1], len(others)] == [True, True, 2]
    assert (checkout.run("scripts/setup", "--thorough").returncode, checkout.installs()) == (0, [])


def test_setup_without_a_gpu_removes_what_links_against_cuda(checkout: Checkout) -> None:
    library = checkout.root / ".venv/lib/python3.11/site-packages/torchaudio/lib/_torchaudio.so"
    checkout.run("scripts/setup")
    library.parent.mkdir(parents=True)
    library.touch()
    (checkout.root / "pyproject.toml").write_text("[project]\nname = 'changed'\n")
    checkout.run("scripts/setup")
    assert "-m pip uninstall --disable-pip-version-check -y torchvision" in checkout.calls("python")
    assert not library.exists()


def test_setup_warns_of_a_cuda_build_without_a_gpu_and_leaves_it(checkout: Checkout) -> None:
    done = checkout.run("scripts/setup", TORCH="13.0 2.13.0+cu130")
    assert done.returncode == 0
    told = (
        "setup: warning: torch 2.13.0+cu130 is a CUDA build, which this machine without a GPU cannot use; it works, "
        "but is large"
    )
    assert [line for line in done.stdout.splitlines() if "warning" in line] == [told]
    assert not any("uninstall" in call for call in checkout.calls("python"))


def test_setup_with_a_gpu_pins_and_removes_nothing(checkout: Checkout) -> None:
    assert checkout.run("scripts/setup", NO_GPU="0").returncode == 0
    [locked, rest] = checkout.installs()
    assert locked.endswith("--require-hashes --no-deps --requirement requirements/lock.txt")
    assert rest.endswith("-e .[dev,train]")
    assert not any("uninstall" in call for call in checkout.calls("python"))


def test_a_gpu_report_without_a_gpu_is_one_line(checkout: Checkout) -> None:
    done = checkout.run("scripts/gpu-report")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        "gpu-report: no NVIDIA GPU answers here (nvidia-smi -L); there is nothing to report on"
    ]
    assert checkout.installs() == []


def test_a_gpu_report_runs_in_the_interpreter_that_is_named_and_makes_no_environment(checkout: Checkout) -> None:
    checkout.add("own-python", '#!/bin/bash\necho "$PYTHONPATH $@"\n')
    done = checkout.run("scripts/gpu-report", "--output", "page.md", NO_GPU="0", PYTHON="own-python")
    assert done.stdout.strip() == f"{checkout.root} scripts/gpu_report.py --output page.md"
    assert checkout.installs() == []


def test_a_framework_is_installed_once_with_torch_in_an_environment_of_its_own(checkout: Checkout) -> None:
    checkout.run("scripts/setup")
    trained = "scripts/train_framework.py swift "
    for installs in (["torch==2.13.0 ms-swift==4.6.0"], []):
        done = checkout.run("scripts/train-framework", "swift")
        assert done.returncode == 0, done.stderr
        assert [call.split(" off ")[1] for call in checkout.installs()] == installs
        assert checkout.calls("python")[-1] == f"{trained}{checkout.root}/.venv/swift/bin/python"
    assert checkout.run("scripts/train-framework", "trl", PYTHON="own-python").returncode == 0
    assert checkout.calls("python") == ["scripts/train_framework.py trl own-python"]


def test_a_framework_that_has_no_release_or_no_installation_is_not_trained(checkout: Checkout) -> None:
    done = checkout.run("scripts/train-framework", "unknown")
    assert (done.returncode, done.stderr) == (2, "usage: scripts/train-framework axolotl|swift|trl\n")
    checkout.run("scripts/setup")
    failed = checkout.run("scripts/train-framework", "axolotl", PIP_FAILS="1", PIP_SAYS="no such release")
    assert (failed.returncode, failed.stderr.splitlines()[-1]) == (1, "no such release")
    assert not any("train_framework" in call for call in checkout.calls("python"))


def test_a_second_setup_does_nothing_and_says_nothing(checkout: Checkout) -> None:
    checkout.run("scripts/setup")
    again = checkout.run("scripts/setup")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert checkout.installs() == []


def test_setup_installs_again_when_the_project_has_changed_and_keeps_the_environment(checkout: Checkout) -> None:
    checkout.run("scripts/setup")
    (checkout.root / ".venv" / "kept").touch()
    (checkout.root / "pyproject.toml").write_text("[project]\nname = 'changed'\n")
    assert checkout.run("scripts/setup").returncode == 0
    assert len(checkout.installs()) == 2
    assert (checkout.root / ".venv" / "kept").exists()


def test_setup_installs_again_when_the_lock_file_has_changed(checkout: Checkout) -> None:
    checkout.run("scripts/setup")
    checkout.lock.write_text("a==1\n")
    assert (checkout.run("scripts/setup").returncode, len(checkout.installs())) == (0, 2)
    assert (checkout.run("scripts/setup").returncode, checkout.installs()) == (0, [])


def test_setup_shows_the_end_of_what_pip_said_and_starts_anew_the_next_time(checkout: Checkout) -> None:
    failed = checkout.run("scripts/setup", PIP_FAILS="1", PIP_SAYS="ERROR: no space left")
    assert failed.returncode == 1
    assert failed.stderr.splitlines() == [
        "ERROR: no space left",
        "setup: pip failed; all of its output: .venv/setup.log",
    ]
    (checkout.root / ".venv" / "half-installed").touch()
    assert checkout.run("scripts/setup").returncode == 0
    assert not (checkout.root / ".venv" / "half-installed").exists()
    assert len(checkout.installs()) == 2


def test_setup_keeps_an_environment_that_somebody_else_made(checkout: Checkout) -> None:
    (checkout.root / ".venv/bin").mkdir(parents=True)
    shutil.copy(checkout.programs / "python3", checkout.root / ".venv/bin/python")
    (checkout.root / ".venv" / "kept").touch()
    assert checkout.run("scripts/setup").returncode == 0
    assert len(checkout.installs()) == 2
    assert (checkout.root / ".venv" / "kept").exists()


def test_setup_names_the_python_that_is_too_old(checkout: Checkout) -> None:
    failed = checkout.run("scripts/setup", TOO_OLD="1", VERSION="3.8.10")
    assert failed.returncode == 1
    assert failed.stderr == "setup: needs Python 3.11 or newer; python3 is Python 3.8.10\n"
    assert not (checkout.root / ".venv").exists()


def test_the_demo_goes_all_the_way_and_takes_the_nodes_down(checkout: Checkout) -> None:
    _with_multinode(checkout)
    assert checkout.run("scripts/demo").returncode == 0
    same = "--no-check --env OMP_NUM_THREADS=1 --set max_steps=20 configs/tiny_sft.yaml"
    one = [f"launch --hosts lab --nodes 1 --workers-per-node 2 {same}"]
    fast, slow = (
        [f"lab rate all {rate}", f"launch --hosts lab --workers-per-node 1 {same}"] for rate in ("1gbit", "100mbit")
    )
    assert checkout.calls("multinode") == [
        "lab up --nodes 2 --rate 1gbit",
        "check --hosts lab configs/tiny_sft.yaml",
        "lab rate all 1gbit",
        "nccl-test --hosts lab -b 1M -e 16M -n 5",
        "lab rate all 100mbit",
        "nccl-test --hosts lab -b 1M -e 16M -n 5",
        *(*one, *fast, *slow),
        *(*slow, *fast, *one),
        *(*one, *fast, *slow),
        "lab down --force",
    ]
    assert checkout.calls("python")[-1].startswith("scripts/closing_table.py --since ")


def test_the_demo_takes_the_nodes_down_when_the_training_fails_and_fails_too(checkout: Checkout) -> None:
    _with_multinode(checkout)
    assert checkout.run("scripts/demo", LAUNCH_FAILS="1").returncode == 1
    assert checkout.calls("multinode")[-1] == "lab down --force"


def test_the_demo_leaves_a_lab_alone_that_it_did_not_make(checkout: Checkout) -> None:
    _with_multinode(checkout)
    assert checkout.run("scripts/demo", UP_FAILS="2").returncode == 2
    assert checkout.calls("multinode") == ["lab up --nodes 2 --rate 1gbit"]


def test_the_demo_takes_the_nodes_down_at_ctrl_c(checkout: Checkout) -> None:
    _with_multinode(checkout)
    with checkout.start("scripts/demo", LAUNCH_TAKES_S="30") as process:
        deadline = time.monotonic() + 20
        while not any(call.startswith("launch") for call in checkout.calls("multinode")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        # As a terminal does: to everything in the foreground.
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=20)
    assert process.returncode == 130
    assert checkout.calls("multinode")[-1] == "lab down --force"


_ISOLATED = "scripts/isolate .venv/bin/python"


@pytest.mark.parametrize(
    ("arguments", "no_gpu", "profile", "also"),
    [
        ((), "1", "quick", " and not thorough and not gpu"),
        ((), "0", "quick", " and not thorough"),
        (("--thorough",), "1", "thorough", " and not gpu"),
    ],
)
def test_what_measures_time_runs_after_all_else_and_what_needs_a_gpu_only_where_there_is_one(
    checkout: Checkout, arguments: tuple[str, ...], no_gpu: str, profile: str, also: str
) -> None:
    done = checkout.run("scripts/test", *arguments, NO_GPU=no_gpu)
    assert done.returncode == 0, done.stderr
    assert "scripts/test tests/cluster" in done.stdout
    together, alone = [call for call in checkout.calls("python") if "pytest" in call]
    options = f"-m pytest --hypothesis-profile={profile} -q -m"
    assert together.startswith(f"{options} not timing{also} --dist loadfile ")
    assert together.endswith(f"*popen//python={_ISOLATED}")
    assert alone == f"{options} timing{also}"


def test_a_part_of_the_tests_is_pytests_own_affair(checkout: Checkout) -> None:
    assert checkout.run("scripts/test", "tests/cluster", "-k", "a b").returncode == 0
    (call,) = [call for call in checkout.calls("python") if "pytest" in call]
    assert call == "-m pytest --hypothesis-profile=quick tests/cluster -k a b"


def test_a_failure_in_parallel_does_not_keep_the_rest_from_running_and_fails(checkout: Checkout) -> None:
    checkout.run("scripts/setup")
    program = checkout.root / ".venv/bin/python"
    program.write_text(f'{program.read_text()}[[ "$*" != *popen* ]]\n')
    assert checkout.run("scripts/test").returncode == 1
    assert len([call for call in checkout.calls("python") if "pytest" in call]) == 2


def _with_multinode(checkout: Checkout) -> None:
    checkout.run("scripts/setup")
    program = checkout.root / ".venv/bin/multinode"
    program.write_text(_MULTINODE)
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("now", "code"),
    [("{}", 0), ("# A comment.\n{}", 0), ('{}new = ["a"]\n', 1)],
)
def test_a_lock_file_is_for_what_the_project_asks_for(tmp_path: Path, now: str, code: int) -> None:
    for name in ("scripts/setup", "scripts/make_lock.py", "requirements/lock.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(_ROOT / name, tmp_path / name)
    section = "[project.optional-dependencies]\n"
    project = (_ROOT / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(project.replace(section, now.format(section)))
    done = subprocess.run(
        [sys.executable, tmp_path / "scripts/make_lock.py", "--check"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, "scripts/make_lock.py" in done.stdout) == (code, code == 1)


def test_a_lock_file_has_versions_and_hashes_alone_and_no_torch() -> None:
    _, *lines = (_ROOT / "requirements/lock.txt").read_text().splitlines()
    line = re.compile(r"(?P<name>[a-z0-9-]+)==[\w.]+(?: ; [\w.<>=!'* ()]+)?(?: --hash=sha256:[0-9a-f]{64})+")
    names = [found["name"] for found in map(line.fullmatch, lines) if found is not None]
    assert len(names) == len(lines)
    assert names == sorted(names)
    assert {"msgspec", "pytest", "llamafactory", "nvidia-ml-py"} < set(names)
    assert not {"torch", "torchaudio", "triton"} & set(names)


def test_a_release_is_not_checked_without_the_python_that_was_asked_for() -> None:
    checked = subprocess.run(
        [_ROOT / "scripts/release-check", "3.11", "3.99"], capture_output=True, text=True, timeout=600, check=False
    )
    assert checked.returncode == 1
    assert checked.stderr == (
        "release-check: there is no Python 3.99 (3.11 or newer) on PATH or in pyenv; by its path: "
        f"{_ROOT / 'scripts/release-check'} PATH\n"
    )
    assert "building" not in checked.stdout
