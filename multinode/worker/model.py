"""The trained model, and how it is distributed over the workers: one record per worker, and another after a change.

Models are found by their wrappers (DDP, DeepSpeed, FSDP), and held by weak references.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import weakref
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Set, Tuple

from .guard import Guard, Hooks
from .steps import Steps
from .token_work import Weight, full_shape, token_work, weights_of

_MIB = 2**20
# Short names of data types, as in accelerate and in the table of GPU peaks.
_AUTOCAST = {"bfloat16": "bf16", "float16": "fp16"}
# Data sets without end may report a huge length.
_MOST_SAMPLES = 2**60
# Settings by their names in DeepSpeed's JSON, and the engine's methods that return their values.
_DEEPSPEED_SETTINGS = {
    "overlap_comm": "zero_overlap_comm",
    "reduce_bucket_size": "zero_reduce_bucket_size",
    "allgather_bucket_size": "zero_allgather_bucket_size",
    "use_multi_rank_bucket_allreduce": "zero_multi_rank_bucket_allreduce",
    "reduce_scatter": "zero_reduce_scatter",
    "contiguous_gradients": "zero_contiguous_gradients",
    "stage3_max_reuse_distance": "zero_max_reuse_distance",
    "zero_hpz_partition_size": "zero_hpz_partition_size",
    "zero_quantized_weights": "zero_quantized_weights",
    "zero_quantized_gradients": "zero_quantized_gradients",
}


def hooks(steps: Steps, guard: Guard) -> Hooks:
    """Modules to wait for, and what to do with each."""
    seen = _Seen()
    steps.meters.append(_Teller(steps, seen).end_step)

    def made(attribute: str, noticed: Callable[[Any], None]) -> Callable[[Any], None]:
        return lambda module: _notice_made(guard, getattr(module, attribute), noticed)

    sharding = functools.partial(_notice_sharded, guard, seen)
    return [
        ("torch.nn.parallel.distributed", made("DistributedDataParallel", seen.ddp.setdefault)),
        ("deepspeed.runtime.engine", made("DeepSpeedEngine", seen.engines.setdefault)),
        ("torch.distributed.fsdp.fully_sharded_data_parallel", made("FullyShardedDataParallel", seen.fsdp.setdefault)),
        # These modules define fully_shard, and all others import it from here. The second is that of torch 2.4.
        ("torch.distributed.fsdp._fully_shard._fully_shard", sharding),
        ("torch.distributed._composable.fsdp.fully_shard", sharding),
        ("torch.amp.autocast_mode", made("autocast", seen.note_autocast)),
        ("torch.optim.optimizer", functools.partial(_notice_optimizers, guard, seen)),
        ("transformers.trainer", made("Trainer", seen.trainers.setdefault)),
    ]


class _Seen:
    """Objects that know the trained model, in order of creation, by weak references."""

    def __init__(self) -> None:
        self.ddp: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self.engines: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        # FullyShardedDataParallel modules, the inner ones too
        self.fsdp: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        # modules given to `fully_shard`, in order, and the settings of each call
        self.sharded: weakref.WeakKeyDictionary[Any, Dict[str, Any]] = weakref.WeakKeyDictionary()
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.trainers: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self.autocast: Dict[str, str] = {}  # data type of the last enabled autocast by device (`cuda`)

    def note_autocast(self, made: Any) -> None:
        """Store the data type of an autocast; disabled ones, as in rotary embeddings, do not count."""
        name = _AUTOCAST.get(_dtype_name(made.fast_dtype) or "")
        # An autocast without gradients is that of an evaluation.
        if name is not None and sys.modules["torch"].is_grad_enabled() and made._enabled:  # noqa: SLF001 - torch tells it nowhere else before it is entered
            self.autocast[made.device] = name


def _notice_made(guard: Guard, kind: Any, noticed: Callable[[Any], None]) -> None:
    def notice(made: Any, *_: Any, **__: Any) -> None:
        noticed(made)

    kind.__init__ = guard.followed(kind.__init__, notice)


def _notice_sharded(guard: Guard, seen: _Seen, library: Any) -> None:
    def note(module: Any, *_: Any, **arguments: Any) -> None:
        settings = _fully_shard_settings(arguments)
        for each in module if isinstance(module, (list, tuple)) else [module]:
            seen.sharded[each] = settings

    library.fully_shard = guard.followed(library.fully_shard, note)


def _notice_optimizers(guard: Guard, seen: _Seen, module: Any) -> None:
    def after_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        seen.optimizers.add(optimizer)

    module.register_optimizer_step_post_hook(guard.quietly(after_step))


class _Teller:
    """Writes the record after a step, and again if it has changed."""

    def __init__(self, steps: Steps, seen: _Seen) -> None:
        self._steps = steps
        self._seen = seen
        self._asked = 0
        self._told: Optional[Dict[str, Any]] = None

    def end_step(self, _step: int) -> Dict[str, Any]:
        """A meter: looks at all parameters after steps 1, 2, 4, 8 and so on, as some may be frozen or added later."""
        self._asked += 1
        if self._asked & (self._asked - 1) == 0:
            fields = _describe(self._seen)
            if fields is not None and fields != self._told:
                self._told = fields
                self._steps.note("model", **fields)
        return {}


class _Parameter(NamedTuple):
    """One parameter of the whole model, before sharding and packing."""

    elements: int
    dtype: str
    is_trainable: bool
    device: Any


class _Spread(NamedTuple):
    """The model as a wrapper knows it; for the fields see ModelSample (records/samples.py)."""

    wrapper: str
    parameters: List[_Parameter]
    settings: Dict[str, Any]
    zero_stage: Optional[int] = None
    accumulation: Optional[int] = None
    modules: Tuple[Any, ...] = ()  # modules that hold the model, as far as they are known
    weights: Tuple[Weight, ...] = ()  # weights of the model, if its modules hold them only in flattened form


def _describe(seen: _Seen) -> Optional[Dict[str, Any]]:
    """The record's fields; None if no trained model has been seen."""
    # The outermost wrapper comes first: an engine may contain a DDP module, and each of them has an optimizer.
    for spread_of in (_spread_of_deepspeed, _spread_of_fsdp, _spread_of_fully_shard, _spread_of_ddp, _spread_of_none):
        spread = spread_of(seen)
        if spread is not None and spread.parameters:
            if spread.accumulation is None:
                spread = spread._replace(accumulation=_accumulation(seen))
            return {**_fields(spread, seen.autocast), "dataset_samples": _dataset_samples(seen)}
    return None


def _fields(spread: _Spread, autocast: Mapping[str, str]) -> Dict[str, Any]:
    trainable = [each for each in spread.parameters if each.is_trainable]
    device = (trainable or spread.parameters)[0].device
    is_cuda = device.type == "cuda"
    return {
        "wrapper": spread.wrapper,
        "zero_stage": spread.zero_stage,
        "parameters": sum(each.elements for each in spread.parameters),
        "trainable": sum(each.elements for each in trainable),
        "dtypes": _by_dtype(spread.parameters),
        "trainable_dtypes": _by_dtype(trainable),
        "accumulation": spread.accumulation,
        "device": device.type,
        "device_name": sys.modules["torch"].cuda.get_device_name(device) if is_cuda else None,
        "device_uuid": _device_uuid(device) if is_cuda else None,
        "mixed_precision": _mixed_precision() or autocast.get(device.type),
        "tf32": _tf32(),
        "settings": spread.settings,
        "token_work": _token_work(spread),
    }


def _device_uuid(device: Any) -> Optional[str]:
    """CUDA's UUID of the GPU, equal for workers that share it; None before torch 2.4."""
    uuid = getattr(sys.modules["torch"].cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else str(uuid)


def _token_work(spread: _Spread) -> Optional[Dict[str, Any]]:
    if not spread.modules:
        return None
    try:
        return token_work(spread.weights or weights_of(*spread.modules), spread.modules)
    except Exception as error:  # noqa: BLE001 - a module may be anything; what else is known of it is told
        return {"is": "unknown", "reason": "its weights could not be counted: %s" % type(error).__name__}


def _by_dtype(parameters: Iterable[_Parameter]) -> Dict[str, int]:
    counts: Dict[str, int] = {}
    for each in parameters:
        counts[each.dtype] = counts.get(each.dtype, 0) + each.elements
    return counts


def _mixed_precision() -> Optional[str]:
    """Accelerate's mixed precision; None if it has none."""
    state = sys.modules.get("accelerate.state")
    # Creating an AcceleratorState would initialize accelerate even if it is imported but unused.
    precision = None if state is None else state.AcceleratorState._shared_state.get("_mixed_precision")  # noqa: SLF001 - read without creating it
    name = None if precision is None else str(getattr(precision, "value", precision))
    return None if name == "no" else name


def _tf32() -> bool:
    """Whether TF32 is used. Torch 2.9 cannot read the older flag once the newer is set; the newer one reflects both."""
    matmul = sys.modules["torch"].backends.cuda.matmul
    newer = getattr(matmul, "fp32_precision", None)
    is_on = matmul.allow_tf32 if newer is None else newer == "tf32"
    return bool(is_on) and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"


def _accumulation(seen: _Seen) -> Optional[int]:
    """Micro-batches per step, by the Trainer or accelerate; None if neither is used."""
    for trainer in reversed(list(seen.trainers)):
        return int(trainer.args.gradient_accumulation_steps)
    state = sys.modules.get("accelerate.state")
    if state is None:
        return None
    # Creating a GradientState would initialize accelerate even if it is imported but unused.
    steps = state.GradientState._shared_state.get("plugin_kwargs", {}).get("num_steps")  # noqa: SLF001 - read without creating it
    return None if steps is None else int(steps)


def _dataset_samples(seen: _Seen) -> Optional[int]:
    """Samples of the training's data set, on all workers together; None if its length is unknown."""
    for trainer in reversed(list(seen.trainers)):
        try:
            samples = len(trainer.callback_handler.train_dataloader.dataset)
        except Exception:  # noqa: BLE001 - a data set's length is the user's code; a stream has none
            return None
        return samples if samples <= _MOST_SAMPLES else None
    return None


def _spread_of_deepspeed(seen: _Seen) -> Optional[_Spread]:
    engines = list(seen.engines)
    # A reference model has an engine, too, which never steps.
    engine = _largest([each for each in engines if each.global_steps] or engines)
    if engine is None:
        return None
    settings = {
        name: getattr(engine, method)() for name, method in _DEEPSPEED_SETTINGS.items() if hasattr(engine, method)
    }
    # With DeepSpeed's own autocast, the buckets' dtypes are sent, whatever the configuration says.
    dtypes = getattr(engine.optimizer, "ipg_buckets", None) or [engine.communication_data_type]
    settings["communication_dtype"] = ", ".join(sorted(_dtype_name(each) or "" for each in dtypes))
    settings["offload_optimizer"] = _offload_device(engine.zero_offload_optimizer())
    settings["offload_param"] = _offload_device(engine.zero_offload_param())
    return _Spread(
        wrapper="deepspeed",
        # Partitioned or offloaded parameters may be on another device than the one that computes.
        parameters=[each._replace(device=engine.device) for each in _parameters(engine.module)],
        settings=settings,
        zero_stage=int(engine.zero_optimization_stage()),
        accumulation=int(engine.gradient_accumulation_steps()),
        modules=(engine.module,),
    )


def _spread_of_fsdp(seen: _Seen) -> Optional[_Spread]:
    units = list(seen.fsdp)
    if not units:
        return None
    unit = units[0]
    strategy = unit.sharding_strategy.name
    return _Spread(
        wrapper="fsdp",
        parameters=[each for unit in units for each in _flat_parameters(unit)],
        settings={
            "sharding_strategy": strategy,
            "reshard_after_forward": strategy in ("FULL_SHARD", "HYBRID_SHARD"),
            "param_dtype": _dtype_name(unit.mixed_precision.param_dtype),
            "reduce_dtype": _dtype_name(unit.mixed_precision.reduce_dtype),
            "backward_prefetch": getattr(unit.backward_prefetch, "name", None),
            "limit_all_gathers": unit.limit_all_gathers,
            "offload_param": "cpu" if unit.cpu_offload.offload_params else "none",
        },
        modules=tuple(reversed(units)),
        weights=tuple(each for unit in units for each in _flat_weights(unit)),
    )


def _spread_of_fully_shard(seen: _Seen) -> Optional[_Spread]:
    if not seen.sharded:
        return None
    # Settings are those of the first sharded module, a layer: the root, the last, keeps parameters after the forward.
    settings = next(iter(seen.sharded.values()))
    modules = tuple(reversed(list(seen.sharded)))
    return _Spread(wrapper="fsdp2", parameters=_parameters(*modules), settings=settings, modules=modules)


def _spread_of_ddp(seen: _Seen) -> Optional[_Spread]:
    module = _largest(seen.ddp)
    if module is None:
        return None
    return _Spread(
        wrapper="ddp",
        parameters=_parameters(*seen.ddp),
        settings={
            "bucket_cap_mb": module.bucket_bytes_cap / _MIB,
            "find_unused_parameters": module.find_unused_parameters,
            "static_graph": module.static_graph,
            "gradient_as_bucket_view": module.gradient_as_bucket_view,
            # Only this names torch's built-in hooks, too.
            "comm_hooks": module._get_ddp_logging_data().get("comm_hook", ""),  # noqa: SLF001 - torch has no other
        },
        modules=tuple(seen.ddp),
    )


def _spread_of_none(seen: _Seen) -> Optional[_Spread]:
    models = [trainer.model for trainer in list(seen.trainers) if getattr(trainer, "model", None) is not None]
    # An optimizer does not know frozen parameters, so it is only used without a Trainer.
    groups = (group for optimizer in list(seen.optimizers) for group in optimizer.param_groups)
    parameters = _parameters(*models) or list(_counted(each for group in groups for each in group["params"]))
    return _Spread(wrapper="none", parameters=parameters, settings={}, modules=tuple(models))


def _largest(modules: Iterable[Any]) -> Optional[Any]:
    """The module with the most trainable parameters; of equal modules the one that was created last."""
    return max(reversed(list(modules)), key=lambda module: _trainable_elements(_parameters(module)), default=None)


def _trainable_elements(parameters: Iterable[_Parameter]) -> int:
    return sum(each.elements for each in parameters if each.is_trainable)


def _parameters(*modules: Any) -> List[_Parameter]:
    return list(_counted(each for module in modules for each in module.parameters()))


def _counted(parameters: Iterable[Any]) -> Iterator[_Parameter]:
    met: Set[int] = set()
    for each in parameters:
        if id(each) not in met:
            met.add(id(each))
            yield _Parameter(_full_size(each), _dtype_name(each.dtype) or "", each.requires_grad, each.device)


def _full_size(parameter: Any) -> int:
    """Number of elements of a parameter before it was partitioned or packed."""
    return math.prod(full_shape(parameter))


def _flat_parameters(unit: Any) -> Iterator[_Parameter]:
    """Original parameters that an FSDP module has flattened into one of its own."""
    if unit._handle is None:  # noqa: SLF001 - torch says it nowhere else
        return
    flat = unit._handle.flat_param  # noqa: SLF001 - torch says it nowhere else
    originals = flat._params or [flat] * len(flat._shapes)  # noqa: SLF001 - torch says it nowhere else
    for original, shape in zip(originals, flat._shapes):  # noqa: SLF001 - torch says it nowhere else
        dtype = _dtype_name(flat.dtype) or ""
        yield _Parameter(math.prod(shape), dtype, original.requires_grad, unit.compute_device)


def _flat_weights(unit: Any) -> Iterator[Weight]:
    """Weights that an FSDP module has flattened, with the modules that use them; a shared one appears for each use."""
    if unit._handle is None:  # noqa: SLF001 - torch says it nowhere else
        return
    flat = unit._handle.flat_param  # noqa: SLF001 - torch says it nowhere else
    originals = flat._params or [flat] * len(flat._shapes)  # noqa: SLF001 - torch says it nowhere else
    shapes = {}
    for place, shape, info in zip(originals, flat._shapes, flat._param_infos):  # noqa: SLF001 - torch says it nowhere else
        key = hash((id(info.module), info.param_name))
        shapes[key] = weight = Weight(info.module_name, info.module, tuple(shape), place.requires_grad, key)
        yield weight
    for info in flat._shared_param_infos:  # noqa: SLF001 - torch says it nowhere else
        first = shapes[hash((id(info.prim_module), info.prim_param_name))]
        yield first._replace(path=info.module_name, owner=info.module)


def _fully_shard_settings(arguments: Dict[str, Any]) -> Dict[str, Any]:
    policy, mesh = arguments.get("mp_policy"), arguments.get("mesh")
    reshard = arguments.get("reshard_after_forward")
    offload = type(arguments.get("offload_policy")).__name__ == "CPUOffloadPolicy"
    return {
        "reshard_after_forward": True if reshard is None else reshard,
        "param_dtype": _dtype_name(getattr(policy, "param_dtype", None)),
        "reduce_dtype": _dtype_name(getattr(policy, "reduce_dtype", None)),
        "mesh": None if mesh is None else "x".join(str(size) for size in mesh.shape),
        "offload_param": "cpu" if offload else "none",
    }


def _offload_device(config: Any) -> str:
    device = getattr(config, "device", None)
    return "none" if device is None else str(getattr(device, "value", device))


def _dtype_name(dtype: Any) -> Optional[str]:
    return None if dtype is None else str(dtype).replace("torch.", "")
