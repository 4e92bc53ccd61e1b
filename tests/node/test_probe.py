from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from multinode.cluster.facts import WITHOUT_CUDA, NodeFacts
from multinode.stats.unknown import known, or_empty, reason_of, unknown_fields
from tests.golden import Golden

from .localnode import LocalNode
from .test_accelerators import NPU


def probe(node: LocalNode, *, env: dict[str, str] | None = None, **request: Any) -> dict[str, Any]:
    code, records = node.call("probe", {"packages": False, **request}, env=env)
    assert code == 0
    assert [record["kind"] for record in records] == ["facts"]
    return records[0]


def program(folder: Path, name: str, text: str) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_the_facts_are_what_the_controller_reads(node: LocalNode) -> None:
    found = probe(node, peers=["127.0.0.1"], paths=["."], ports=[29500])
    facts = msgspec.convert(found, NodeFacts)
    assert set(found) - {"kind"} == set(NodeFacts.__struct_fields__) - {"node", "clock_offset_s"}
    assert facts.hostname == os.uname().nodename
    assert facts.home == str(node.home)
    assert facts.cores == len(os.sched_getaffinity(0))
    assert facts.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert known(facts.memory_total_gib) > 0.1
    assert known(facts.disk_free_gib) > 0
    assert facts.agent_python == sys.version.split()[0]
    assert {name for name in NodeFacts.__struct_fields__ if getattr(facts, name) is None} <= {"accelerator"}
    assert all(each.reason for each in unknown_fields(facts).values())


def test_the_loopback_interface_and_the_route_through_it_are_found(node: LocalNode) -> None:
    facts = msgspec.convert(probe(node, peers=["127.0.0.1", "no-address"]), NodeFacts)
    loopback = next(link for link in or_empty(facts.interfaces) if link.name == "lo")
    assert "127.0.0.1/8" in loopback.addresses
    assert (loopback.kind, loopback.up, loopback.mtu) == ("loopback", True, 65536)
    route, unknown = facts.routes
    assert (route.source, route.ifname) == ("127.0.0.1", "lo")
    assert reason_of(unknown.source) == "not an IP address"


def test_the_holder_of_a_port_is_named(node: LocalNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ports = [taken.getsockname()[1], free.getsockname()[1]]
        free.close()
        held, other = probe(node, ports=ports)["ports"]
    assert (held["port"], held["taken"], other) == (ports[0], True, {"port": ports[1], "taken": False, "user": None})
    assert f"pid {os.getpid()}" in held["user"]
    assert "user " in held["user"]


def test_a_port_that_is_held_on_ipv6_for_both_is_taken_as_well(node: LocalNode) -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        port = taken.getsockname()[1]
        assert f"pid {os.getpid()}" in probe(node, ports=[port])["ports"][0]["user"]


def test_packages_come_from_the_jobs_interpreter(node: LocalNode) -> None:
    # A wrapper, as conda and environment modules have them, around the interpreter with our packages.
    wrapper = program(node.home / "bin", "python3", f'#!/bin/sh\necho "welcome"\nexec {sys.executable} "$@"\n')
    facts = probe(node, python="~/bin/python3", packages=True)
    assert facts["python"] == wrapper
    assert facts["python_version"] == sys.version.split()[0]
    names = {"torch", "llamafactory", "transformers", "accelerate", "deepspeed", "peft", "trl"}
    assert set(facts["packages"]["values"]) <= names | {"datasets", "bitsandbytes", "flash-attn"}


def check_reasons(node: LocalNode, golden: Golden, name: str, unknown: dict[str, dict[str, str]]) -> None:
    told = "".join(f"{case}: {fact['reason']}\n" for case, fact in unknown.items())
    golden.check(name, told.replace(str(node.home), "HOME"))


def test_why_there_is_no_interpreter_or_no_packages(node: LocalNode, golden: Golden) -> None:
    (node.home / "env").mkdir()
    program(node.home / "env/bin", "python", "#!/bin/sh\n")
    broken = program(node.home, "broken", "#!/bin/sh\necho 'cannot load libpython' >&2\nexit 4\n")
    none = probe(node, python="~/venv/bin/python", packages=True)
    directory = probe(node, python="~/env/", packages=True)
    fails = probe(node, python=broken, packages=True)
    assert none["packages"] == none["python_version"] == none["python"]
    assert (fails["python"], fails["python_version"]) == (broken, fails["packages"])
    unknown = {"no file": none["python"], "a directory": directory["python"], "it fails": fails["packages"]}
    check_reasons(node, golden, "no_interpreter.txt", unknown)


def test_gpus_and_what_runs_on_them_come_from_nvidia_smi(node: LocalNode) -> None:
    line = "NVIDIA GeForce RTX 4090, 24564"
    table = f"6, {line}, 20311, 550.54.15, GPU-6f, Enabled\\n7, {line}, [N/A], 550.54.15, GPU-7a, Disabled\\n"
    answers = f"case $1 in --query-gpu=*) printf '{table}';; *) printf 'GPU-6f, {os.getpid()}, 20293\\n';; esac"
    program(node.home / "bin", "nvidia-smi", f"#!/bin/sh\n{answers}\n")
    facts = probe(node, env={"PATH": f"{node.home}/bin:{node.env['PATH']}"})
    assert [gpu["index"] for gpu in facts["gpus"]] == [6, 7]
    assert facts["gpus"][0]["memory_total_mib"] == 24564
    assert facts["gpus"][1]["memory_used_mib"] is None
    assert [(one["pid"], one["memory_mib"]) for one in facts["gpus"][0]["processes"]] == [(os.getpid(), 20293)]
    assert facts["gpus"][1]["processes"] == []


def test_gpus_are_there_where_their_processes_are_not_told(node: LocalNode, golden: Golden) -> None:
    table = "0, NVIDIA GeForce RTX 4090, 24564, 18, 550.54.15, GPU-6f, [N/A]\\n"
    answers = f"case $1 in --query-gpu=*) printf '{table}';; *) echo 'Insufficient Permissions'; exit 4;; esac"
    program(node.home / "bin", "nvidia-smi", f"#!/bin/sh\n{answers}\n")
    facts = probe(node, env={"PATH": f"{node.home}/bin:{node.env['PATH']}"})
    (gpu,) = facts["gpus"]
    check_reasons(node, golden, "no_gpu_processes.txt", {"processes": gpu["processes"]})


def test_why_there_are_no_gpus(node: LocalNode, golden: Golden) -> None:
    (node.home / "bin").mkdir()
    none = probe(node, env={"PATH": "/nowhere"})["gpus"]
    program(node.home / "bin", "nvidia-smi", "#!/bin/sh\necho 'driver/library version mismatch'\nexit 18\n")
    fails = probe(node, env={"PATH": f"{node.home}/bin:/bin"})["gpus"]
    check_reasons(node, golden, "no_gpus_of_node.txt", {"no nvidia-smi": none, "it fails": fails})


def test_the_devices_of_another_vendor_are_listed_by_its_own_program(node: LocalNode) -> None:
    (node.home / "table").write_text(NPU)
    program(node.home / "bin", "npu-smi", f"#!/bin/sh\ncat {node.home}/table\n")
    facts = probe(node, env={"PATH": f"{node.home}/bin:/bin:/usr/bin"})
    assert (facts["accelerator"], [gpu["index"] for gpu in facts["gpus"]]) == ("npu", [0, 1])


def test_no_other_vendor_is_asked_where_nvidia_smi_is(node: LocalNode) -> None:
    program(node.home / "bin", "nvidia-smi", "#!/bin/sh\nexit 9\n")
    program(node.home / "bin", "npu-smi", f"#!/bin/sh\ntouch {node.home}/asked\n")
    facts = probe(node, env={"PATH": f"{node.home}/bin:/bin:/usr/bin"})
    assert facts["gpus"]["reason"].startswith("nvidia-smi exited with code 9")
    assert not (node.home / "asked").exists()


def test_the_directory_of_the_job(node: LocalNode) -> None:
    (node.home / "project").mkdir()
    here = str(node.home / "project")
    assert probe(node, workdir="~/project")["cwd"] == here
    assert probe(node, controller_cwd=here)["cwd"] == here
    assert probe(node, controller_cwd="/only/there")["cwd"] == str(node.home)
    facts = probe(node, workdir="/no/such", controller_cwd=here)
    assert facts["cwd"]["reason"] == "/no/such is not a directory"


def test_paths_are_looked_at_from_the_directory_of_the_job(node: LocalNode) -> None:
    (node.home / "project" / "data").mkdir(parents=True)
    (node.home / "project" / "job.yaml").touch()
    paths = ["data", "job.yaml", "out/new", "~/project", "/proc/nothing"]
    found = probe(node, workdir="~/project", paths=paths)["paths"]
    assert [(fact["path"], fact["kind"]) for fact in found] == list(
        zip(paths, ["directory", "file", "missing", "directory", "missing"], strict=True)
    )
    assert [fact["writable"] for fact in found[:4]] == [True] * 4


def test_where_ssh_came_in(node: LocalNode) -> None:
    facts = probe(node, env={"SSH_CONNECTION": "10.0.0.9 50000 10.0.0.1 22"})
    assert facts["ssh_address"] == "10.0.0.1"
    assert "SSH_CONNECTION" in probe(node)["ssh_address"]["reason"]


# A torch that finds one GPU unless it is told to find none, and leaves a mark when it is imported.
TORCH = """
import os, warnings
class cuda:
    def is_available():
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            warnings.warn("CUDA initialization: no CUDA-capable device is detected")
            return False
        return True
    def get_arch_list():
        return ["sm_90", "compute_90"]
    def device_count():
        return 1
    def get_device_properties(number):
        return type("Properties", (), {"name": "NVIDIA GB10", "major": 12, "minor": 1})
with open(os.environ["HOME"] + "/imports", "a") as file:
    file.write("x")
"""


def test_torch_is_asked_for_its_gpus_once_for_each_environment(node: LocalNode) -> None:
    table = "0, NVIDIA GB10, [N/A], [N/A], 580.95.05, GPU-6f, [N/A]\\n"
    program(node.home / "bin", "nvidia-smi", f"#!/bin/sh\ncase $1 in --query-gpu=*) printf '{table}';; esac\n")
    torch = node.home / "site" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text(TORCH)
    (torch / "version.py").write_text("cuda: Optional[str] = '13.0'\n")
    env = {"PATH": f"{node.home}/bin:/bin:/usr/bin", "PYTHONPATH": str(torch.parent)}

    def asked(torch_env: dict[str, str] | None) -> tuple[dict[str, Any], int]:
        facts = probe(node, python=sys.executable, packages=True, torch_env=torch_env, env=env)
        imports = node.home / "imports"
        return facts["torch_devices"], len(imports.read_text()) if imports.exists() else 0

    assert asked(None) == ({"is": "unknown", "reason": "not asked for"}, 0)
    gpu = {"name": "NVIDIA GB10", "capability": [12, 1]}
    there = {"is": "devices", "available": True, "reason": None, "kernels": ["sm_90", "compute_90"], "gpus": [gpu]}
    assert [asked({}), asked({})] == [(there, 1), (there, 1)]
    assert asked({"LD_LIBRARY_PATH": "/compat"}) == (there, 2)
    none, _ = asked({"CUDA_VISIBLE_DEVICES": ""})
    assert none is not None
    assert (none["available"], none["reason"]) == (
        False,
        "CUDA initialization: no CUDA-capable device is detected",
    )
    # What kept it from them may be gone.
    assert asked({"CUDA_VISIBLE_DEVICES": ""})[1] == 4
    (torch / "version.py").write_text("cuda: Optional[str] = None\n")
    assert asked({}) == ({"is": "unknown", "reason": WITHOUT_CUDA.reason}, 4)
