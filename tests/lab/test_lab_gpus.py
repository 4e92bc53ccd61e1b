"""Nodes that share GPUs, on a machine without one: what would be mounted, by mount tables of real containers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import msgspec
import pytest

from multinode.cluster.hostfile import parse_hostfile
from multinode.errors import UsageError
from multinode.lab.cluster import require_lab, up_lab
from multinode.lab.nodes import hostfile_text
from multinode.lab.state import CPU_ENVIRONMENT
from tests.equipment.command import up
from tests.equipment.gpus import GPU_ENVIRONMENT, count_gpus, gpu_files

from .conftest import SMALL

Command = Callable[..., CompletedProcess[str]]

# A container of docker's on a machine with driver 384.183, by `mount | grep nvi` (NVIDIA/nvidia-docker#997).
CONTAINER = """\
tmpfs on /proc/driver/nvidia type tmpfs (rw,nosuid,nodev,noexec,relatime,mode=555)
/dev/mapper/vg_centos7-root on /usr/bin/nvidia-smi type ext4 (ro,nosuid,nodev,relatime,data=ordered)
/dev/mapper/vg_centos7-root on /usr/bin/nvidia-debugdump type ext4 (ro,nosuid,nodev,relatime,data=ordered)
/dev/mapper/vg_centos7-root on /usr/bin/nvidia-persistenced type ext4 (ro,nosuid,nodev,relatime,data=ordered)
/dev/mapper/vg_centos7-root on /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.384.183 type ext4 (ro,nosuid,nodev,relatime)
/dev/mapper/vg_centos7-root on /usr/lib/x86_64-linux-gnu/libnvidia-cfg.so.384.183 type ext4 (ro,nosuid,nodev,relatime)
"""
DEVICES = ("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-caps/nvidia-cap1", "null")


def table(text: str) -> str:
    """What `mount` prints as /proc/self/mounts has it."""
    rows = (line.split() for line in text.splitlines())
    return "".join(f"{row[0]} {row[2]} {row[4]} {row[5][1:-1]} 0 0\n" for row in rows)


def machine(root: Path, devices: tuple[str, ...] = DEVICES) -> Path:
    for name in devices:
        (root / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "dev" / name).touch()
    return root


def test_devices_and_what_a_container_runtime_has_mounted_are_shared(tmp_path: Path) -> None:
    # A driver's directory is a disk, as Google's GKE mounts it; the rest of a container's mounts is its own.
    (tmp_path / "usr/local/nvidia").mkdir(parents=True)
    others = "/dev/sda1 on /usr/local/nvidia type ext4 (ro)\n/dev/sda1 on /etc/hosts type ext4 (rw)\n"
    library = "/dev/sda1 on /usr/lib64/libcuda.so.575.64.05 type ext4 (ro)\n"
    mounts = table(CONTAINER + others + library + "devtmpfs on /dev/nvidiactl type devtmpfs (ro)\n")
    assert gpu_files(machine(tmp_path), mounts, is_device=Path.is_file) == (
        "/dev/nvidia-caps/nvidia-cap1",
        "/dev/nvidia-uvm",
        "/dev/nvidia0",
        "/dev/nvidiactl",
        "/usr/bin/nvidia-smi",
        "/usr/bin/nvidia-debugdump",
        "/usr/bin/nvidia-persistenced",
        "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.384.183",
        "/usr/lib/x86_64-linux-gnu/libnvidia-cfg.so.384.183",
        "/usr/lib64/libcuda.so.575.64.05",
    )


def test_a_driver_without_devices_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no device files /dev/nvidia"):
        gpu_files(machine(tmp_path, ("null",)), table(CONTAINER), is_device=Path.is_file)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 9", "it lists none"),
        (
            "echo 'NVIDIA-SMI has failed because it could not communicate with the driver.'; exit 9",
            "could not communicate",
        ),
        (None, "was not found"),
    ],
)
def test_without_a_gpu_that_answers_nothing_is_made(tmp_path: Path, script: str | None, said: str) -> None:
    program = [str(tmp_path / "missing")] if script is None else ["sh", "-c", script]
    with pytest.raises(UsageError, match=f"no NVIDIA GPU answers on this machine .*{said}") as caught:
        count_gpus(program)
    assert caught.value.hint is not None


def test_each_line_of_nvidia_smi_is_a_gpu() -> None:
    assert count_gpus(["printf", "GPU-5fd9\nGPU-77ab\n"]) == 2


@pytest.mark.parametrize(
    ("environment", "said"), [(CPU_ENVIRONMENT, ("cpu", None)), (GPU_ENVIRONMENT, (None, "Socket"))]
)
def test_nodes_that_share_a_gpu_have_the_network_alone_between_them(
    environment: dict[str, str], said: tuple[str | None, str | None]
) -> None:
    cluster = parse_hostfile(hostfile_text(msgspec.structs.replace(SMALL, job_env=environment)), "hosts")
    assert [(node.env.get("DS_ACCELERATOR"), node.env.get("NCCL_NET")) for node in cluster.nodes] == [said] * 2


@pytest.mark.lab
@pytest.mark.usefixtures("no_lab")
def test_a_mounted_file_and_a_device_are_on_each_node_what_they_are_here(shell: Command, shared_dir: Path) -> None:
    """Mounted over an empty file, as a container runtime does it; a device of the kernel's own stands for a GPU."""
    library, device = shared_dir / "libcuda.so.1", shared_dir / "nvidia0"
    (shared_dir / "driver").write_text("driver\n")
    library.touch()
    os.mknod(device, 0o666 | 0o020000, os.makedev(1, 5))
    subprocess.run(["mount", "--bind", str(shared_dir / "driver"), str(library)], check=True)
    try:
        up_lab(msgspec.structs.replace(SMALL, shared_files=(str(device), str(library), "/dev/zero")), measure=False)
        for name in ("node0", "node1"):
            said = shell(name, f"cat {library}; head -c 3 {device} | od -An -tx1; test -c /dev/zero && hostname").stdout
            assert said.split() == ["driver", "00", "00", "00", name]
        boot_ids = {node.boot_id for node in require_lab().nodes}
        assert len(boot_ids) == 2
    finally:
        subprocess.run(["umount", str(library)], check=True)


@pytest.mark.lab
@pytest.mark.usefixtures("no_lab")
def test_a_shared_directory_is_the_same_on_each_node(shell: Command, shared_dir: Path) -> None:
    """As CUDA MPS needs it: what a node writes into a pipe there is read here, as no overlay would let it."""
    pipe = shared_dir / "control"
    os.mkfifo(pipe)
    up_lab(msgspec.structs.replace(SMALL, shared_files=(str(shared_dir),)), measure=False)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for name in ("node0", "node1"):
            shell(name, f"timeout 5 sh -c 'echo from {name} > {pipe}'; touch {shared_dir}/{name}")
            assert os.read(reader, 100) == f"from {name}\n".encode()
            assert (shared_dir / name).exists()
    finally:
        os.close(reader)


def test_a_lab_of_gpus_on_a_machine_without_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/sbin:/usr/bin:/sbin:/bin")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho No devices were found; exit 6\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    with pytest.raises(UsageError, match=r"no NVIDIA GPU answers on this machine \(No devices"):
        up(["--gpus"])
