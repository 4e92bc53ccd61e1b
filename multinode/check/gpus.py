"""GPUs: present on every node, of one model, with matching software, and free.

What holds them may be another process, or left over from an earlier run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from operator import attrgetter

from multinode.check.rule import (
    Check,
    CheckFinding,
    CheckRule,
    CheckRules,
    Inspection,
    disagreements,
    launch_check,
    listed,
)
from multinode.cluster.accelerators import NVIDIA, accelerator_named
from multinode.cluster.cluster import Node
from multinode.cluster.facts import WITHOUT_CUDA, Gpu, GpuProcess, NodeFacts, RunProcess, select_gpus
from multinode.cluster.hostfile import fold_numbers
from multinode.errors import UsageError
from multinode.job.job import ScriptJob, TrainingJob
from multinode.records.benchmark import CollectiveTest
from multinode.stats.unknown import Unknown, entries, or_empty, or_none, or_zero, reason_of
from multinode.units import format_count, format_duration, format_figure

_GPUS = CheckRules("gpus")
_VERSIONS = CheckRules("versions")
_LEFTOVERS = CheckRules("leftovers")

NO_GPU_FOR_BACKEND = _GPUS.error(
    about="a GPU backend (nccl, xccl, hccl) is requested on a node without such a GPU",
    message="the {backend} backend needs a GPU that it supports, but this node has none ({reason})",
    hint="to measure the same network without GPUs, use --backend gloo",
)
NO_GPU_HERE = _GPUS.error(
    about="some nodes have GPUs and others have none (no driver, or a container without --gpus)",
    message="no GPU was found here ({reason}), but {peer} has {count}. Workers here would use gloo while the others "
    "use NCCL, so the first collective would hang",
    hint="run nvidia-smi on {node}. If it fails, the driver is missing or broken; after a driver update, reboot. "
    "Start containers with --gpus all, or remove the node from the hostfile",
)
NO_SUCH_GPU = _GPUS.error(
    about="gpus= names a GPU that the node does not have",
    message="the hostfile assigns GPU {ids} to it, but it has {there}. Workers would find no device",
    hint="correct gpus= in the hostfile; list the GPUs of {node}:\nnvidia-smi -L",
)
TOO_FEW_GPUS = _GPUS.error(
    about="more workers than GPUs on a node",
    message="{workers} workers would run here, but the node has {gpus}. The last worker would find no device",
    hint="set slots={count} in the hostfile",
)
WRONG_SLOTS = _GPUS.error(
    about="fewer slots than requested workers, or unequal numbers of workers in a job that groups workers by node",
    message="{reason}",
    hint="{way!s}",
)
MIXED_VENDORS = _GPUS.error(
    about="accelerators from different vendors, whose backends are incompatible",
    message="it has {accelerator} devices, but {peer} has {expected}. Their backends ({backend} and {other}) are "
    "incompatible, so the first collective would fail or hang",
    hint="train on nodes with accelerators from one vendor; --nodes K uses the first K nodes of the hostfile",
)
MIXED_MODELS = _GPUS.warning(
    about="nodes have different GPU models, so the slowest GPU limits the speed",
    message="its workers use {models}, but {peer} uses {expected}. Every step waits for the slowest GPU",
    hint=(
        "train on identical nodes. To select GPUs on a node, use gpus= in the hostfile; to use only the first N nodes, "
        "use --nodes N"
    ),
)
MIG_ON_SOME = _GPUS.warning(
    about="MIG divides some of the job's GPUs, but a MIG instance is slower than a whole GPU",
    message="MIG divides GPU {index} here, but {peer} has a whole GPU. The job gets a MIG instance here, and every "
    "step waits for the worker on this instance",
    hint="use MIG on all nodes or on none, or select other GPUs with gpus= in the hostfile. To list the MIG instances "
    "of {node}:\nnvidia-smi -L",
)
GPU_LOST = _GPUS.error(
    about="a GPU fell off the bus: nvidia-smi shows an error instead of its name",
    message="GPU {index} does not respond ({error}). The job would find no device, or hang",
    hint="reboot {node}. If it happens again, look for Xid errors there:\nsudo dmesg | grep -i xid",
)
MIXED_MEMORY = _GPUS.warning(
    about="GPUs of the same model have different amounts of memory, so the smallest limits the batch size",
    message="a GPU has {memory} of memory here and {expected} on {peer}. A batch that fits on one may not fit on the "
    "other",
    hint="choose a per-device batch that fits on the smallest GPU",
)
DRIVERS_DIFFER = _GPUS.warning(
    about="nodes have different versions of the NVIDIA driver",
    message="the NVIDIA driver is {version} here and {expected} on {peer}. Programs that work there may fail here",
    hint="install the same driver on both nodes. To see the version on {node}:\nnvidia-smi --query-gpu=driver_version "
    "--format=csv",
)
NO_PEER_TO_PEER = _GPUS.warning(
    about="GeForce RTX 40 GPUs with a driver before 550.40.07, which reports peer-to-peer support that does not work",
    message="{nodes}: driver {version} reports peer-to-peer access between the {model} GPUs, although they do not "
    "support it (fixed in driver 550.40.07). NCCL may hang. Accelerate, which the Hugging Face Trainer and "
    "LLaMA-Factory use, starts only if NCCL_P2P_DISABLE and NCCL_IB_DISABLE are set",
    hint="set env.NCCL_P2P_DISABLE=1 and env.NCCL_IB_DISABLE=1 (=0 if NCCL should use RDMA) for {nodes!s} in the "
    "hostfile, or install driver 550.40.07 or later",
)
SLOW_NVIDIA_SMI = _GPUS.note(
    about="nvidia-smi takes seconds, because the driver is reloaded for each program",
    message=(
        "nvidia-smi took {duration}. Without persistence mode, the driver is reloaded for each program, including "
        "every training run"
    ),
    hint="enable the nvidia-persistenced service, or run on {node}:\nsudo nvidia-smi -pm 1",
)
NCCL_DIFFERS = _VERSIONS.error(
    about="nodes have incompatible versions of NCCL",
    message="NCCL is {version} here and {expected} on {peer}: workers with these versions refuse to connect or hang",
    hint="run this on {node}:\n{python} -m pip install {package}",
)
CUDA_DIFFERS = _VERSIONS.warning(
    about="torch was built with different versions of CUDA",
    message="torch was built with CUDA {version} here and with {expected} on {peer}: kernels and NCCL may differ",
    hint="install torch from the same package index on both nodes; run on {node}:\n{python} -m pip install "
    "--force-reinstall {package}",
)

_TO_CPUS = "If you want to train on the CPUs: --env CUDA_VISIBLE_DEVICES="
TORCH_WITHOUT_CUDA = _VERSIONS.error(
    about="torch was built without CUDA, although the job uses a node's NVIDIA GPUs. On aarch64, `pip install torch` "
    "may install such a build",
    message="{nodes}: torch {version} was built without CUDA{pip}, so the job would train on the CPUs instead of "
    "{gpus}",
    hint="install a build with CUDA on {nodes!s}. " + _TO_CPUS + "\n{python} -m pip install --force-reinstall "
    "{package} --index-url {index}",
)
TORCH_TOO_NEW = _VERSIONS.error(
    about="torch finds no GPU because its CUDA version is too new for the driver",
    message="{nodes}: torch finds no GPU. It was built for CUDA {cuda}, which needs NVIDIA driver {needed} or later, "
    "but the driver is {driver}. The job would train on the CPUs",
    hint="install driver {needed} or later on {nodes!s}, or a build of torch for the installed driver. "
    + _TO_CPUS
    + "\n"
    "{python} -m pip install --force-reinstall {package} --index-url {index}",
)
MAY_BE_TOO_NEW = _VERSIONS.warning(
    about="torch's CUDA version is too new for the driver, and multinode could not check whether torch finds a GPU",
    message="{nodes}: torch was built for CUDA {cuda}, which needs NVIDIA driver {needed} or later, but the driver is "
    "{driver}. torch may find no GPU ({reason})",
    hint="on {nodes!s}, check whether torch finds a GPU (it does with CUDA's forward-compatibility libraries):\n"
    "{python} -c 'import torch; torch.cuda.init()'",
)
TORCH_FINDS_NO_GPU = _VERSIONS.error(
    about="nvidia-smi lists GPUs, but the job's torch finds none",
    message="{nodes}: torch finds no GPU ({reason}), so the job would train on the CPUs instead of {gpus}",
    hint="run the command below on {nodes!s} to find out why. "
    + _TO_CPUS
    + "\n{python} -c 'import torch; torch.cuda.init()'",
)
NO_KERNELS = _VERSIONS.error(
    about="torch has no kernels for the architecture of a GPU, so the first kernel fails",
    message="{nodes}: torch {version} has no kernels for {model} (compute capability {capability}), only for {built}. "
    "The first kernel would fail with `no kernel image is available`",
    hint="install a build for this GPU on {nodes!s}:\n{python} -m pip install --force-reinstall {package} --index-url "
    "{index}",
)

GPU_HELD = _GPUS.warning(
    about="another process uses a GPU that the job would use",
    message="GPU {index} is in use by {who}; {used} of its {total} of memory is taken. The job would share this GPU, "
    "and every step waits for the slowest GPU of all nodes",
    hint=(
        "run nvidia-smi on {node} to see which processes use the GPU. Wait until they end, or choose other GPUs with "
        "gpus= in the hostfile"
    ),
)
GPU_FULL = _GPUS.error(
    about="a GPU that the job would use has almost no free memory",
    message="GPU {index} is full: {who} uses {used} of its {total}, so the job would run out of memory",
    hint=(
        "run nvidia-smi on {node} to see which processes use the GPU. Wait until they end, or choose other GPUs with "
        "gpus= in the hostfile"
    ),
)
LEFTOVER = _LEFTOVERS.warning(
    about="processes of an earlier run are still running without a supervisor",
    message="run {run} left {count} ({commands}) behind without a supervisor. The job cannot use the cores, memory "
    "and ports that are still occupied",
    hint="run this on {node}:\nkill -9 {pids!s}",
)
LEFTOVER_ON_GPU = _LEFTOVERS.error(
    about="processes of an earlier run still use a GPU that the job would use",
    message="GPU {gpus} is still in use by {count} ({commands}) of run {run}, which no longer has a supervisor. The "
    "job would share the GPU, or run out of memory",
    hint="run this on {node}:\nkill -9 {pids!s}",
)
RUN_GOES_ON = _LEFTOVERS.note(
    about="another multinode run is still running",
    message="run {run} is still running on {nodes}, so it would share cores, memory and network with the job",
    hint="wait until it ends, or stop it on all its nodes (add --hosts HOSTFILE if another machine launched it):\n"
    "multinode stop {run}",
)
RUN_ON_GPU = _LEFTOVERS.warning(
    about="another multinode run still uses GPUs that the job would use",
    message="run {run} is still running here and uses GPU {gpus}, which the job would share",
    hint="wait until it ends, choose other GPUs in the hostfile (gpus=), or stop it on all its nodes (add --hosts "
    "HOSTFILE if another machine launched it):\nmultinode stop {run}",
)

_WHEELS = "https://download.pytorch.org/whl/"
# First driver of each major version of CUDA ("CUDA Compatibility", minor version compatibility): a hint, no judgement,
# as forward-compatibility libraries run a newer CUDA.
_FIRST_DRIVERS = {"13": 580, "12": 525, "11": 450}
# The newest of PyTorch's indices that a driver can run: Blackwell's kernels begin with CUDA 12.8 and driver 570.
_INDICES = ((580, "cu130"), (570, "cu128"), (0, "cu126"))
# The last index with kernels for GPUs before Turing.
_OLDEST_INDEX = "cu126"
_ADA_GEFORCE = re.compile(r"GeForce RTX 40\d0")
_P2P_DRIVER = (550, 40, 7)
_ALIKE = 0.05
_SLOW_QUERY_S = 5.0
# Memory that a desktop may use; a CUDA context alone takes more.
_LITTLE_MIB = 256.0
_FULL = 0.9
# Memory in use without a visible process: containers hide processes. The driver reserves less.
_UNSEEN = 0.1
_SHOWN = 4


@launch_check
def check_presence(inspection: Inspection) -> Iterator[CheckFinding]:
    """All nodes have GPUs, or none; a collective test has those of its backend."""
    backend = _backend(inspection)
    having = [(node.name, len(gpus)) for node, facts in inspection.known if (gpus := or_empty(facts.gpus))]
    for node, facts in inspection.known if backend != "gloo" else ():
        gpus = or_empty(facts.gpus)
        if backend is None and having and not gpus:
            yield NO_GPU_HERE.found(node.name, reason=_why_none(facts), peer=having[0][0], count=having[0][1])
        elif backend is not None and (not gpus or accelerator_named(facts.accelerator).backend != backend):
            yield NO_GPU_FOR_BACKEND.found(node.name, backend=backend, reason=_why_none(facts))


@Check
def check_counts(inspection: Inspection) -> Iterator[CheckFinding]:
    """Every node has the GPUs in the hostfile, one per worker, and the workers that the job needs."""
    some = {bool(or_empty(facts.gpus)) for _, facts in inspection.known}
    workers: dict[str, int] = {}
    try:
        workers = inspection.require_workers()
        counts = inspection.workers_of_nodes() or ()
        if len(set(counts)) > 1 and isinstance(inspection.job, TrainingJob | ScriptJob):
            from multinode.job.restrictions import refuse_unequal

            refuse_unequal(inspection.job, {}, inspection.options.environment.env, inspection.cluster, counts)
    except UsageError as error:
        # Nodes without GPUs are already reported.
        if len(some) == 1:
            yield WRONG_SLOTS.found(error.node, reason=error.message, way=error.hint)
    for node, facts in inspection.known:
        there = {gpu.index for gpu in or_empty(facts.gpus)}
        lacking = [str(gpu) for gpu in node.gpus or () if gpu not in there]
        if lacking and (there or True not in some):
            has = f"GPU {fold_numbers(sorted(there))}" if there else f"none ({_why_none(facts)})"
            yield NO_SUCH_GPU.found(node.name, ids=" and ".join(lacking), there=has)
        wanted = node.slots or workers.get(node.name) or 1
        count = len(facts.visible_gpus)
        if count and node.gpus is None and wanted > count and _on_gpus(inspection):
            yield TOO_FEW_GPUS.found(node.name, workers=wanted, gpus=format_count(count, "GPU"), count=count)


@launch_check
def check_vendors(inspection: Inspection) -> Iterator[CheckFinding]:
    """All accelerators are of one vendor."""
    having = [
        (node.name, accelerator_named(facts.accelerator)) for node, facts in inspection.known if or_empty(facts.gpus)
    ]
    for name, accelerator in having if _on_gpus(inspection) else ():
        peer, expected = having[0]
        if accelerator != expected:
            yield MIXED_VENDORS.found(
                name,
                accelerator=accelerator.name,
                peer=peer,
                expected=expected.name,
                backend=accelerator.backend,
                other=expected.backend,
            )


@launch_check
def check_lost_gpus(inspection: Inspection) -> Iterator[CheckFinding]:
    """Every GPU that the job would use answers."""
    for node, facts in inspection.known:
        for gpu in used_gpus(inspection, node, facts):
            if gpu.is_lost:
                yield GPU_LOST.found(node.name, index=gpu.index, error=gpu.name.strip("[]"))


@Check
def check_models(inspection: Inspection) -> Iterator[CheckFinding]:
    """The workers use GPUs of one model and memory size."""
    used = _used(inspection)
    for name, gpus in used.items():
        first = next(iter(used))
        expected = used[first][0]
        peer = "its first worker" if name == first else first
        divided = [gpu for gpu in gpus if gpu.mig]
        whole = next((other for other, others in used.items() if not all(gpu.mig for gpu in others)), None)
        if divided and whole is not None:
            index = " and ".join(str(gpu.index) for gpu in divided)
            yield MIG_ON_SOME.found(name, index=index, peer="another worker here" if whole == name else whole)
        models = list(dict.fromkeys(gpu.name for gpu in gpus))
        if models != [expected.name]:
            yield MIXED_MODELS.found(name, models=" and ".join(models), peer=peer, expected=expected.name)
            continue
        memory = min((gpu.memory_total_mib for gpu in gpus if gpu.memory_total_mib), default=None)
        there = expected.memory_total_mib
        if memory and there and abs(memory - there) > _ALIKE * there:
            yield MIXED_MEMORY.found(name, memory=_gib(memory), peer=peer, expected=_gib(there))


@Check
def check_drivers(inspection: Inspection) -> Iterator[CheckFinding]:
    """One driver version, none known to break these GPUs, and it stays loaded."""
    used = _used(inspection)
    nvidia = {node.name for node, facts in inspection.known if accelerator_named(facts.accelerator) is NVIDIA}
    drivers = {name: gpus[0].driver for name, gpus in used.items() if name in nvidia}
    for name, version, peer, expected in disagreements(drivers):
        if version and expected:
            yield DRIVERS_DIFFER.found(name, version=version, peer=peer, expected=expected)
    for node, facts in inspection.known:
        query_s = or_zero(facts.gpu_query_s)
        if query_s > _SLOW_QUERY_S:
            yield SLOW_NVIDIA_SMI.found(node.name, duration=format_duration(query_s))
        gpus = used.get(node.name, ())
        # Accelerate counts all GPUs of the node, and asks only whether the variables are there.
        several = len(or_empty(facts.gpus)) > 1 and bool(gpus) and _lacks_peer_to_peer(gpus[0])
        if several and not inspection.env(node).keys() >= {"NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"}:
            yield NO_PEER_TO_PEER.found(node.name, model=gpus[0].name, version=gpus[0].driver)


@Check
def check_torch_builds(inspection: Inspection) -> Iterator[CheckFinding]:
    """NCCL and CUDA of the job's torch are the same on all nodes that use them."""
    facts = {node.name: facts for node, facts in inspection.known if or_empty(facts.gpus) and _on_gpus(inspection)}
    for rule, version_of in ((NCCL_DIFFERS, attrgetter("nccl_version")), (CUDA_DIFFERS, attrgetter("cuda_version"))):
        versions = {
            name: version for name, software in facts.items() if (version := or_none(version_of(software))) is not None
        }
        for name, version, peer, expected in disagreements(versions):
            software, model = facts[name], facts[peer]
            torch = entries(model.packages).get("torch")
            package = f"torch=={torch}" if torch is not None else "torch"
            # With the same torch, only NCCL can differ.
            if rule is NCCL_DIFFERS and entries(software.packages).get("torch") == torch:
                cuda = or_none(model.cuda_version) or "12"
                package = f"nvidia-nccl-cu{cuda.partition('.')[0]}=={expected}"
            python = or_none(software.python) or "python3"
            yield rule.found(name, version=version, peer=peer, expected=expected, python=python, package=package)


@launch_check
def check_torch_gpus(inspection: Inspection) -> Iterator[CheckFinding]:
    """The job's torch finds the GPUs that it would use, and has kernels for them."""
    for node, facts in inspection.known:
        gpus, torch = used_gpus(inspection, node, facts), entries(facts.packages).get("torch")
        if not gpus or torch is None or _hides_gpus(inspection, node, facts):
            continue
        is_nvidia = accelerator_named(facts.accelerator) is NVIDIA
        driver, cuda = gpus[0].driver or "", or_none(facts.cuda_version)
        texts = {
            "version": torch,
            "python": or_none(facts.python) or "python3",
            "package": f"torch=={torch.partition('+')[0]}",
            "gpus": f"{len(gpus)} x {gpus[0].name}",
            "driver": driver,
            "cuda": cuda,
            "index": _WHEELS + next(index for first, index in _INDICES if _major(driver) >= first),
        }
        devices = facts.torch_devices
        needed = _FIRST_DRIVERS.get((cuda or "").partition(".")[0], 0) if is_nvidia else 0
        is_old = bool(driver) and _major(driver) < needed
        if is_nvidia and facts.cuda_version == WITHOUT_CUDA:
            pip = " (the default of `pip install torch` on aarch64)" if facts.architecture == "aarch64" else ""
            yield TORCH_WITHOUT_CUDA.found(node.name, pip=pip, **texts)
        elif isinstance(devices, Unknown):
            if is_old:
                yield MAY_BE_TOO_NEW.found(node.name, needed=needed, reason=devices.reason, **texts)
        elif not devices.available:
            reason = devices.reason or "it gave no reason"
            rule = TORCH_TOO_NEW if is_old else TORCH_FINDS_NO_GPU
            yield rule.found(node.name, needed=needed, reason=reason, **texts)
        else:
            # torch and nvidia-smi name a GPU alike, and may number it differently.
            used = {gpu.name for gpu in gpus}
            for gpu in dict.fromkeys(gpu for gpu in devices.gpus if gpu.name in used):
                if not devices.has_kernels_for(gpu):
                    index = texts["index"] if devices.is_older_than(gpu) else _WHEELS + _OLDEST_INDEX
                    yield NO_KERNELS.found(
                        node.name,
                        **texts | {"index": index},
                        model=gpu.name,
                        capability=".".join(map(str, gpu.capability)),
                        built=", ".join(devices.kernels),
                    )


def _hides_gpus(inspection: Inspection, node: Node, facts: NodeFacts) -> bool:
    """Whether the job's own variables leave it no GPU, as of one that shall train on CPUs."""
    values = map(inspection.env(node).get, accelerator_named(facts.accelerator).visible)
    return any(value is not None and not select_gpus(value, or_empty(facts.gpus)) for value in values)


def _major(driver: str) -> int:
    found = re.match(r"\d+", driver)
    return int(found[0]) if found is not None else 0


@Check
def check_gpus_free(inspection: Inspection) -> Iterator[CheckFinding]:
    """The job's GPUs have free memory, and no other process uses them."""
    for node, facts in inspection.known:
        for gpu in used_gpus(inspection, node, facts):
            ours = any(process.run_id is not None for process in or_empty(gpu.processes))
            others = [
                process
                for process in or_empty(gpu.processes)
                if process.run_id is None and (process.memory_mib is None or process.memory_mib >= _LITTLE_MIB)
            ]
            rule = _judge(gpu, ours=ours, others=bool(others))
            if rule is not None:
                yield rule.found(
                    node.name,
                    index=gpu.index,
                    who=listed(map(_describe, others), _SHOWN) or "processes of other users",
                    used=_gib(gpu.memory_used_mib),
                    total=_gib(gpu.memory_total_mib),
                )


@Check
def check_leftovers(inspection: Inspection) -> Iterator[CheckFinding]:
    """No process of an earlier run is left, and no other run is in progress."""
    for node, facts in inspection.known:
        for run, processes in _by_run(facts).items():
            pids = {process.pid: process.command or "a process" for process in processes}
            held = [
                gpu.index
                for gpu in used_gpus(inspection, node, facts)
                if pids.keys() & ({process.pid for process in or_empty(gpu.processes)})
            ]
            gpus = " and ".join(map(str, held))
            if all(process.supervised for process in processes):
                yield RUN_ON_GPU.found(node.name, run=run, gpus=gpus) if gpus else RUN_GOES_ON.found(node.name, run=run)
                continue
            yield (LEFTOVER_ON_GPU if gpus else LEFTOVER).found(
                node.name,
                run=run,
                gpus=gpus,
                count="1 process" if len(processes) == 1 else f"{len(processes)} processes",
                commands=listed(pids.values(), _SHOWN),
                pids=" ".join(map(str, pids)),
            )


def used_gpus(inspection: Inspection, node: Node, facts: NodeFacts) -> tuple[Gpu, ...]:
    """The GPUs of a node that the job would use; empty if it uses none."""
    if not _on_gpus(inspection):
        return ()
    if node.gpus is not None:
        return tuple(gpu for gpu in or_empty(facts.gpus) if gpu.index in node.gpus)
    return facts.visible_gpus[: node.slots]


def _used(inspection: Inspection) -> dict[str, tuple[Gpu, ...]]:
    """By node, without lost ones, of which nothing else is known."""
    used = {
        node.name: tuple(gpu for gpu in used_gpus(inspection, node, facts) if not gpu.is_lost)
        for node, facts in inspection.known
    }
    return {name: gpus for name, gpus in used.items() if gpus}


def _backend(inspection: Inspection) -> str | None:
    return inspection.job.backend if isinstance(inspection.job, CollectiveTest) else None


def _on_gpus(inspection: Inspection) -> bool:
    return _backend(inspection) != "gloo"


def _why_none(facts: NodeFacts) -> str:
    return reason_of(facts.gpus) or "none listed"


def _lacks_peer_to_peer(gpu: Gpu) -> bool:
    numbers = tuple(int(part) for part in re.findall(r"\d+", gpu.driver or ""))
    return bool(numbers) and numbers < _P2P_DRIVER and _ADA_GEFORCE.search(gpu.name) is not None


def _judge(gpu: Gpu, *, ours: bool, others: bool) -> CheckRule | None:
    share = None
    if gpu.memory_used_mib is not None and gpu.memory_total_mib:
        share = gpu.memory_used_mib / gpu.memory_total_mib
    # GPUs held by our own runs are reported as leftovers.
    if share is not None and share >= _FULL and (others or not ours):
        return GPU_FULL
    unseen = share is not None and share >= _UNSEEN and not or_empty(gpu.processes)
    return GPU_HELD if others or unseen else None


def _by_run(facts: NodeFacts) -> dict[str, list[RunProcess]]:
    runs: dict[str, list[RunProcess]] = {}
    for process in or_empty(facts.run_processes):
        # The name of a run on a node ends in the node rank.
        run, _, rank = process.run_id.rpartition(".")
        runs.setdefault(run if run and rank.isdigit() else process.run_id, []).append(process)
    return runs


def _describe(process: GpuProcess) -> str:
    parts = [f"pid {process.pid}"]
    if process.user is not None:
        parts.append(f"user {process.user}")
    if process.memory_mib is not None:
        parts.append(_gib(process.memory_mib))
    return f"{process.command or 'a process'} ({', '.join(parts)})"


def _gib(memory_mib: float | None) -> str:
    return "an unknown part" if memory_mib is None else f"{format_figure(memory_mib / 1024)} GiB"
