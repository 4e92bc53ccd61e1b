from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from multinode.node.facts.software import find_container, read_machine, read_processor_name
from multinode.node.facts.unknown import Unknown
from tests.golden import raised

GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> str:
    for place, text in files.items():
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def test_every_fact_is_there_or_has_a_reason() -> None:
    facts = read_machine()
    assert None not in facts.values()
    unknown = [value for value in facts.values() if isinstance(value, Unknown)]
    assert all(value["reason"] for value in unknown)
    assert facts["memory_total_gib"] > facts["memory_available_gib"] > 0
    shm = os.statvfs("/dev/shm")
    assert facts["shm_total_gib"] == pytest.approx(shm.f_blocks * shm.f_frsize / GIB)
    assert 0 <= facts["shm_free_gib"] <= facts["shm_total_gib"]


def test_limits_are_soft_limits_and_none_is_unlimited() -> None:
    limits = read_machine()["limits"]
    assert limits["open_files"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert set(limits) == {"open_files", "processes", "locked_memory_bytes"}
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert limits["locked_memory_bytes"] == (None if locked == resource.RLIM_INFINITY else locked)


# The first processor as Linux shows it on x86, and on ARM, whose processors have numbers for names.
X86 = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel\t\t: 17\nmodel name\t: {}\nstepping\t: 1\n"
ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (X86.format("AMD EPYC 9B14 96-Core Processor"), "AMD EPYC 9B14 96-Core Processor"),
        (X86.format("Intel(R) Core(TM)2 Duo CPU     T7300  @ 2.00GHz"), "Intel(R) Core(TM)2 Duo CPU T7300 @ 2.00GHz"),
        (X86.format("x" * 1000), "x" * 200),
        (X86.format(""), None),
        (ARM, None),
        ("", None),
    ],
)
def test_processors_are_called_what_the_kernel_calls_them(tmp_path: Path, text: str, name: str | None) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert read_processor_name(str(path)) == name
    assert read_processor_name(str(tmp_path / "none")) is None


def test_the_processors_of_this_machine_are_a_fact_or_missed() -> None:
    name = read_processor_name()
    assert read_machine()["processor"] == (name or Unknown("the kernel does not report it"))


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({".dockerenv": ""}, "docker"),
        ({"run/.containerenv": ""}, "podman"),
        ({"run/systemd/container": "lxc\n"}, "lxc"),
        ({"proc/1/environ": "PATH=/bin\0container=systemd-nspawn\0"}, "systemd-nspawn"),
        ({"proc/1/cgroup": "8:memory:/docker/3f4e\n"}, "docker"),
        ({"proc/1/cgroup": "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-2.scope\n"}, "kubernetes"),
        ({".dockerenv": "", "proc/1/environ": "KUBERNETES_SERVICE_HOST=10.96.0.1\0"}, "kubernetes"),
    ],
)
def test_a_container_is_known_by_what_its_maker_leaves(tmp_path: Path, files: dict[str, str], kind: str) -> None:
    assert find_container({}, tree(tmp_path, files)) == kind


def test_a_machine_is_no_container(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/1/cgroup": "0::/init.scope\n", "proc/1/environ": "HOME=/\0"})
    assert str(raised(LookupError, find_container, {}, root)) == "no sign of a container"
