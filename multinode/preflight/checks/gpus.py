"""GPUs: those that the job is to use are there on every node, alike, and driven by software that fits together.

Who else uses them is the matter of `occupancy`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from multinode.core.check.finding import Finding, Rule
from multinode.core.cluster.cluster import Node
from multinode.core.cluster.facts import Gpu, NodeFacts
from multinode.core.measure.benchmark import CollectiveTest
from multinode.core.run.planning import workers_per_node
from multinode.errors import UsageError
from multinode.preflight.grouping import group_findings
from multinode.preflight.inspection import Inspection

__all__ = [
    "check_backend",
    "check_counts",
    "check_drivers",
    "check_models",
    "check_presence",
    "check_torch_builds",
    "used_gpus",
    "worker_count",
]

NO_GPU_FOR_NCCL = Rule(
    check="gpus",
    severity="error",
    catches="the nccl backend was asked for on a node without a GPU",
    message="the nccl backend needs a GPU, and there is none ({reason})",
    hint="--backend gloo measures the same network without a GPU",
)
NO_GPU_HERE = Rule(
    check="gpus",
    severity="error",
    catches="some nodes have GPUs and others have none: driver gone, container without --gpus",
    message="no GPU was found here ({reason}), and {peer} has {count}: its workers would speak gloo where the others "
    "speak NCCL, and the first collective would hang",
    hint="on {node}: nvidia-smi. Without its answer the driver is missing or broken (a reboot after an update of it "
    "mends most); in a container: start it with --gpus all. Or take the node out of the hostfile",
)
NO_SUCH_GPU = Rule(
    check="gpus",
    severity="error",
    catches="gpus= names a GPU that the node does not have",
    message="the hostfile gives it GPU {ids}, and it has {there}: the workers on them would find no device",
    hint="on {node}: nvidia-smi -L; correct gpus= in the hostfile",
)
TOO_FEW_GPUS = Rule(
    check="gpus",
    severity="error",
    catches="more workers than GPUs on a node",
    message="{workers} workers shall run here, and it has {count} GPUs: the last would find no device",
    hint="slots={count} in the hostfile, on every node as many",
)
UNEQUAL_SLOTS = Rule(
    check="gpus",
    severity="error",
    catches="nodes with unequal numbers of workers, which torchrun waits for without end",
    message="{reason}",
    hint="{way!s}",
)
MIXED_MODELS = Rule(
    check="gpus",
    severity="warning",
    catches="nodes with different models of GPU: the slowest sets the pace",
    message="it trains on {models}, and {peer} on {expected}: every step waits for the slowest of them",
    hint="train on nodes that are alike; gpus= in the hostfile chooses cards of a node, --nodes the first nodes",
)
MIXED_MEMORY = Rule(
    check="gpus",
    severity="warning",
    catches="GPUs of one model with different amounts of memory: the smallest sets the batch size",
    message="a GPU of it has {memory} of memory, that of {peer} {expected}: what fits one may not fit the other",
    hint="choose per_device_train_batch_size for the smallest",
)
DRIVERS_DIFFER = Rule(
    check="gpus",
    severity="warning",
    catches="different versions of the NVIDIA driver",
    message="its NVIDIA driver is {version}, that of {peer} {expected}: what works there may fail here",
    hint="install the same driver on both; on {node}: nvidia-smi --query-gpu=driver_version --format=csv",
)
NO_PEER_TO_PEER = Rule(
    check="gpus",
    severity="warning",
    catches="GeForce RTX 40 cards with a driver before 550.40.07, which offers peer-to-peer that does not work",
    message="{nodes}: several {model} with driver {version}. Before 550.40.07 it offers peer-to-peer access that "
    "these cards do not have, and NCCL may hang over it",
    hint="for {nodes!s} in the hostfile: env.NCCL_P2P_DISABLE=1; or a driver from 550.40.07 on",
)
NCCL_DIFFERS = Rule(
    check="versions",
    severity="error",
    catches="different versions of NCCL under torch: they cannot speak with each other",
    message="NCCL is {version} here and {expected} on {peer}: they refuse each other, or hang",
    hint="on {node}: {python} -m pip install {package}",
)
CUDA_DIFFERS = Rule(
    check="versions",
    severity="warning",
    catches="torch built with different versions of CUDA",
    message="torch was built with CUDA {version} here and with {expected} on {peer}: kernels and NCCL may differ",
    hint="install torch on both from the same package index; on {node}: {python} -m pip install --force-reinstall "
    "{package}",
)

_ADA_GEFORCE = re.compile(r"GeForce RTX 40\d0")
_P2P_DRIVER = (550, 40, 7)
_ALIKE = 0.05


def check_backend(inspection: Inspection) -> Iterator[Finding]:
    """A collective test that asks for NCCL has a GPU on every node."""
    if not isinstance(inspection.job, CollectiveTest) or inspection.job.backend != "nccl":
        return
    for node, found in inspection.known:
        if not found.gpus:
            yield NO_GPU_FOR_NCCL.found(node.name, reason=found.missing.get("gpus", "none listed"))


def check_presence(inspection: Inspection) -> Iterator[Finding]:
    """Either every node has GPUs or none has."""
    if isinstance(inspection.job, CollectiveTest) and inspection.job.backend is not None:
        return
    having = [(node, len(found.gpus)) for node, found in inspection.known if found.gpus]
    for node, found in inspection.known:
        if having and not found.gpus:
            reason = found.missing.get("gpus", "none listed")
            yield NO_GPU_HERE.found(node.name, reason=reason, peer=having[0][0].name, count=having[0][1])


def check_counts(inspection: Inspection) -> Iterator[Finding]:
    """Every node has the GPUs that the hostfile gives it, one for each worker, and as many workers as the others."""
    workers, error = _workers(inspection)
    # Where some nodes have no GPU, what they lack has been said.
    if error is not None and len({bool(found.gpus) for _, found in inspection.known}) == 1:
        yield UNEQUAL_SLOTS.found(None, reason=error.message, way=error.hint)
    for node, found in inspection.known:
        there = {gpu.index for gpu in found.gpus}
        lacking = [str(gpu) for gpu in node.gpus or () if gpu not in there]
        if lacking and (there or not _some_have_gpus(inspection)):
            listed = ", ".join(map(str, sorted(there)))
            has = f"GPU {listed}" if there else f"none ({found.missing.get('gpus', 'none listed')})"
            yield NO_SUCH_GPU.found(node.name, ids=" and ".join(lacking), there=has)
        wanted = node.slots or workers or 1
        if there and node.gpus is None and wanted > len(there) and _on_gpus(inspection):
            yield TOO_FEW_GPUS.found(node.name, workers=wanted, count=len(there))


def check_models(inspection: Inspection) -> Iterator[Finding]:
    """The workers run on GPUs of one model with one amount of memory."""
    nodes = [(node, gpus) for node, found in inspection.known if (gpus := used_gpus(inspection, node, found))]
    for node, gpus in nodes:
        expected = nodes[0][1][0]
        peer = "its first worker" if node is nodes[0][0] else nodes[0][0].name
        models = list(dict.fromkeys(gpu.name for gpu in gpus))
        if models != [expected.name]:
            yield MIXED_MODELS.found(node.name, models=" and ".join(models), peer=peer, expected=expected.name)
            continue
        memory = min((gpu.memory_total_mib for gpu in gpus if gpu.memory_total_mib), default=None)
        there = expected.memory_total_mib
        if memory and there and abs(memory - there) > _ALIKE * there:
            yield MIXED_MEMORY.found(node.name, memory=_gib(memory), peer=peer, expected=_gib(there))


def check_drivers(inspection: Inspection) -> Iterator[Finding]:
    """One version of the driver, and none that is known to break these cards."""
    nodes = [(node, found, gpus) for node, found in inspection.known if (gpus := used_gpus(inspection, node, found))]
    without = []
    for node, found, gpus in nodes:
        version, expected = gpus[0].driver, nodes[0][2][0].driver
        if version and expected and version != expected:
            yield DRIVERS_DIFFER.found(node.name, version=version, peer=nodes[0][0].name, expected=expected)
        if len(gpus) > 1 and _lacks_peer_to_peer(gpus[0]) and "NCCL_P2P_DISABLE" not in found.env | node.env:
            without.append((node.name, {"model": gpus[0].name, "version": str(version)}))
    yield from group_findings(NO_PEER_TO_PEER, without)


def check_torch_builds(inspection: Inspection) -> Iterator[Finding]:
    """NCCL and CUDA of the job's torch are the same everywhere, where they are used."""
    nodes = [(node, found) for node, found in inspection.known if found.gpus and _on_gpus(inspection)]
    for rule, version_of in ((NCCL_DIFFERS, _nccl_version), (CUDA_DIFFERS, _cuda_version)):
        having = [(node, found) for node, found in nodes if version_of(found) is not None]
        for node, found in having[1:]:
            first, model = having[0]
            if version_of(found) != version_of(model):
                yield rule.found(
                    node.name,
                    version=version_of(found),
                    peer=first.name,
                    expected=version_of(model),
                    python=found.python or "python3",
                    package=_same_nccl(found, model) if rule is NCCL_DIFFERS else _same_torch(model),
                )


def used_gpus(inspection: Inspection, node: Node, found: NodeFacts) -> tuple[Gpu, ...]:
    """Those of a node that the job would use; none where it uses no GPU."""
    if not _on_gpus(inspection):
        return ()
    if node.gpus is not None:
        return tuple(gpu for gpu in found.gpus if gpu.index in node.gpus)
    return tuple(sorted(found.gpus, key=lambda gpu: gpu.index)[: node.slots])


def worker_count(inspection: Inspection) -> int | None:
    """Workers on each node, by the hostfile and the GPUs; None where the nodes differ."""
    return _workers(inspection)[0]


def _workers(inspection: Inspection) -> tuple[int | None, UsageError | None]:
    nodes = tuple(node for node, _ in inspection.known)
    if not nodes:
        return None, None
    try:
        return workers_per_node(msgspec.structs.replace(inspection.cluster, nodes=nodes), inspection.facts, None), None
    except UsageError as error:
        return None, error


def _some_have_gpus(inspection: Inspection) -> bool:
    return any(found.gpus for _, found in inspection.known)


def _on_gpus(inspection: Inspection) -> bool:
    """Whether the job would use GPUs where there are any."""
    return not (isinstance(inspection.job, CollectiveTest) and inspection.job.backend == "gloo")


def _lacks_peer_to_peer(gpu: Gpu) -> bool:
    numbers = tuple(int(part) for part in re.findall(r"\d+", gpu.driver or ""))
    return bool(numbers) and numbers < _P2P_DRIVER and _ADA_GEFORCE.search(gpu.name) is not None


def _nccl_version(found: NodeFacts) -> str | None:
    return found.nccl_version


def _cuda_version(found: NodeFacts) -> str | None:
    return found.cuda_version


def _same_torch(model: NodeFacts) -> str:
    return f"torch=={model.packages['torch']}" if "torch" in model.packages else "torch"


def _same_nccl(found: NodeFacts, model: NodeFacts) -> str:
    """What pip has to install to bring the node's NCCL to the model's: torch, or beside the same torch NCCL alone."""
    if found.packages.get("torch") != model.packages.get("torch"):
        return _same_torch(model)
    major = (model.cuda_version or "12").partition(".")[0]
    return f"nvidia-nccl-cu{major}=={model.nccl_version}"


def _gib(memory_mib: float) -> str:
    return f"{memory_mib / 1024:.3g} GiB"
