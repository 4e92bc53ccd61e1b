"""Tuning options: what could be changed in a training: its settings, its strategy, its cluster. Judges no gain."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec

from multinode.cluster.hostfile import fold_numbers
from multinode.errors import JobError, UsageError
from multinode.findings.finding import Finding
from multinode.findings.rule import Rule, RuleGroup
from multinode.job.deepspeed import HPZ_WORKERS, DeepSpeedConfig, edit_deepspeed, parse_deepspeed, parse_deepspeed_edits
from multinode.job.job import own_overrides
from multinode.job.job_files import Change
from multinode.levers.averaging import Averaging
from multinode.levers.compression import Compression
from multinode.levers.levers import NONE, Levers
from multinode.model.memory import COUNTED
from multinode.model.training import fsdp_word
from multinode.predict.break_even import beats_one, on_one_node
from multinode.predict.cost_model import make_low_rank
from multinode.predict.network_model import comm_times
from multinode.predict.screen import link_words
from multinode.predict.step_efficiency import step_efficiency
from multinode.predict.training_state import TrainingState, TuningOption
from multinode.predict.variants import vary
from multinode.profile.summary_sheets import SMALLER
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Call, Strategy
from multinode.units import format_count, format_figure, format_rate

_BYTES_PER_GIB, _MIB = 1 << 30, 1 << 20
_FP32_BYTES, _HALF_BYTES = 4, 2
_MULTIPLES = (2, 4, 8)
# Casting to half and back takes time that nothing has measured.
_CAST_DOUBT = 0.05
# torch's DDP fills buckets of 25 MiB; four times that is where a slow network no longer feels the number of messages.
_DDP_BUCKET_BYTES, _LARGE_BUCKET_MIB = 25 * _MIB, 100
_FEW_CALLS = 2
_LORA_RANK = 8
# What HF's Trainer gathers of each worker (transformers 5.6, trainer.py): the number of tokens of a step, an int64; of
# a logged step the loss, and what it computed so far, a float32 each.
_COUNT_BYTES, _LOGGED_BYTES = 8, 4
_LOG_EVERY = 10
_OFTEN = 0.5
# From a strategy that communicates much to those that communicate less; each makes the same steps, and costs memory.
_MOVES = {
    Strategy.ZERO3: (Strategy.ZERO3_HPZ, Strategy.ZERO2, Strategy.DDP),
    Strategy.ZERO3_HPZ: (Strategy.ZERO2, Strategy.DDP),
    Strategy.ZERO2: (Strategy.ZERO1, Strategy.DDP),
    Strategy.ZERO1: (Strategy.DDP,),
    Strategy.FSDP: (Strategy.HYBRID_SHARD, Strategy.DDP),
    Strategy.SHARD_GRAD_OP: (Strategy.DDP,),
    Strategy.HYBRID_SHARD: (Strategy.DDP,),
}
_POWER_SGD_RANK = 4
# From what changes a training little to what sends least.
_AVERAGINGS = (
    Averaging(every=4),
    Averaging(every=16),
    Averaging(every=16, dtype="fp16"),
    Averaging(every=64, dtype="fp16"),
    Averaging(every=64, dtype="fp16", outer_lr=0.7, momentum=0.9),
)
# What NICs and switches are sold with, Gbit/s.
_STANDARD_GBIT_PER_S = (1, 2.5, 5, 10, 25, 40, 100)
_MOST_LINKS = 4
_CLEARLY_FASTER = 1.2
_REDUCTIONS = frozenset({"all_reduce", "reduce_scatter", "broadcast"})
_replace = msgspec.structs.replace

EFFECTS = RuleGroup("Advice: what a change affects besides the speed")
_ROUNDED = EFFECTS.rule(
    "rounded-gradients",
    about="compressed gradients",
    message="gradients are rounded to {bits} significant bits",
    figures=("bits",),
)
_OVERFLOW = EFFECTS.rule("overflow", about="gradients in fp16", message="values above 65504 overflow")
# What papers publish of the loss.
_LOW_RANK = EFFECTS.rule(
    "low-rank-gradients",
    about="PowerSGD",
    message="gradients are approximated, so the loss may be worse. Published result: test accuracy on par with SGD "
    "for convolutional networks and LSTMs (Vogels et al. 2019, arXiv:1905.13727)",
)
_APART = "a different algorithm: nodes train independently between averaging steps, so the loss may be worse{measured}"
_LOCAL_SGD = EFFECTS.rule(
    "local-sgd",
    about="nodes that average their parameters",
    message=f"{_APART}. Published results: it converges like mini-batch SGD for convex losses (Stich 2019, "
    "arXiv:1805.09767), but many workers or local steps may reduce the accuracy of neural networks (Lin et al. 2020, "
    "arXiv:1808.07217)",
    figures=("step_efficiency",),
)
_DILOCO = EFFECTS.rule(
    "diloco",
    about="an outer optimizer between nodes",
    message=f"{_APART}. Published result: on par with synchronous training on C4 with 8 workers (Douillard et al. "
    "2023, arXiv:2311.08105)",
    figures=("step_efficiency",),
)
_BATCH = EFFECTS.rule(
    "global-batch",
    about="a different global batch",
    message="global batch {now} instead of {before}",
    figures=("samples_before", "samples"),
)
_LARGER_BATCH = EFFECTS.rule(
    "larger-batch",
    about="a larger global batch",
    message="global batch {now} instead of {before}, so an epoch has fewer optimizer steps; you may have to adjust "
    "the learning rate",
    figures=("samples_before", "samples"),
)
_EQUAL_WEIGHT = EFFECTS.rule(
    "equal-weight",
    about="a loss that is not averaged over tokens",
    message="without average_tokens_across_devices, every worker's mean loss has the same weight, even if workers "
    "have different numbers of tokens",
)
_ADAPTER = EFFECTS.rule(
    "adapter",
    about="LoRA instead of full fine-tuning",
    message="trains an adapter with {millions} M parameters instead of the whole model",
    figures=("trainable",),
)
_UNCHANGED = EFFECTS.rule(
    "unchanged", about=("a training job that the change does not affect"), message="the training is unchanged"
)
_EQUIPMENT = EFFECTS.rule(
    "equipment",
    about="a faster link",
    message="requires faster NICs, cables and switches, so multinode cannot try it",
)
_FREED = EFFECTS.rule("free-nodes", about="fewer nodes", message="the other nodes become available for other work")

REMARKS = RuleGroup("Advice: what the figures of a change do not show")
_REPEATED = REMARKS.rule(
    "repeated-calls",
    about="accumulation with a strategy that communicates in every micro-batch",
    message="with {strategy}, accumulation saves less traffic per sample than with DDP, because {engine} {does} in "
    "every micro-batch: a worker sends {after} MB per sample with the change, and {before} MB without it{saving}",
    figures=("sample_mb_before", "sample_mb"),
)
_ONE_BUCKET = REMARKS.rule(
    "one-bucket",
    about="overlap of DeepSpeed's buckets",
    message=(
        "if all gradients are in one bucket, its reduction cannot overlap with compute; a smaller reduce_bucket_size "
        "helps"
    ),
)
_FEWER_MESSAGES = REMARKS.rule(
    "fewer-messages", about="larger buckets", message=("fewer messages, but each starts later")
)
_SMALL_CALLS = REMARKS.rule(
    "small-collectives",
    about="small collectives that a script calls",
    message="{after} small collectives per step instead of {before}; each takes a round trip",
    figures=("calls_before", "calls"),
)
_ACTIVATIONS = REMARKS.rule(
    "activations", about="a larger micro-batch", message="activations take about twice the memory"
)
_UNKNOWN_MEMORY = REMARKS.rule(
    "memory-unknown",
    about="another strategy, for a model of unknown size",
    message="the model's size is unknown, so the training may not fit into a worker's memory",
)
_STATES = REMARKS.rule(
    "model-states",
    about="memory that another strategy needs",
    message=f"model states take {{after}} GiB per worker instead of {{before}} ({COUNTED})",
    figures=("states_gib_before", "states_gib"),
)
_FITS = REMARKS.rule(
    "fits-gpu",
    about="another strategy that fits on the GPUs",
    message="{expected}the model states fit on a GPU with {gpu} GiB{condition}",
    figures=("expected_gib", "gpu_gib"),
)
_FITS_NOT = REMARKS.rule(
    "exceeds-gpu",
    about="another strategy that does not fit on the GPUs",
    message="{expected}the model states do not fit on a GPU with {gpu} GiB",
    figures=("expected_gib", "gpu_gib"),
)
_BREAK_EVEN = REMARKS.rule(
    "break-even",
    about="the link rate above which several nodes are faster than one",
    message="break-even link rate of {nodes} nodes with {each}, compared with 1 node: {link}{exceeds}",
    figures=("break_even_gbit_per_s",),
)
_FULL_NODES = REMARKS.rule(
    "full-nodes", about="more workers on each node", message="assumes a GPU or enough cores for every added worker"
)


def setting_options(state: TrainingState) -> Iterator[TuningOption]:
    """Changes of the training's own settings. In a script's settings, only what the hook does can be changed."""
    several = (
        (_compress, _approximate, _average, _accumulate, _overlap, _larger_buckets, _gather_less)
        if state.scenario.layout.workers > 1
        else ()
    )
    for options in (*several, _larger_batch, _lora, _strategies):
        for option in options(state):
            change = option.change
            written = change is not None and (change.overrides or change.deepspeed or change.env)
            if state.is_script and written:
                yield _replace(option, change=None)
            else:
                yield _replace(option, change=_in_own_keys(state, change)) if change is not None else option


def _in_own_keys(state: TrainingState, change: Change) -> Change:
    """The change as `--set` takes it: in the keys of the job's framework."""
    job = state.subject.job if state.subject is not None else None
    return change if job is None else _replace(change, overrides=own_overrides(job, change.overrides))


def _compress(state: TrainingState) -> Iterator[TuningOption]:
    """DDP's hook: only there, and only where gradients travel as fp32."""
    settings, load = state.settings, state.calibration.work.load
    wide = load.gradient_bytes == _FP32_BYTES
    if state.scenario.strategy is Strategy.DDP and settings.levers.compression is None and wide:
        dtype = "bf16" if settings.precision == "bf16" else "fp16"
        lever = Levers(compression=Compression(kind=dtype))
        yield TuningOption(
            name=f"gradients in {dtype}",
            kind="gradients",
            before=state,
            after=state.with_levers(lever),
            change=Change(levers=lever),
            # On a slow network the copies of all buckets are on their way at once.
            extra_gib=load.trainable * _HALF_BYTES / _BYTES_PER_GIB,
            doubt=_CAST_DOUBT,
            effects=(_ROUNDED.found(None, bits=8),)
            if dtype == "bf16"
            else (_ROUNDED.found(None, bits=11), _OVERFLOW.found(None)),
        )


def _approximate(state: TrainingState) -> Iterator[TuningOption]:
    load, lever = state.calibration.work.load, Levers(compression=Compression(kind=f"powersgd:{_POWER_SGD_RANK}"))
    if state.scenario.strategy is not Strategy.DDP or state.settings.levers.compression is not None:
        return
    low_rank = make_low_rank(state.calibration.matrices, load, _POWER_SGD_RANK)
    if low_rank.left + low_rank.right + low_rank.rest < 1 / 2:
        yield TuningOption(
            name=f"PowerSGD of rank {_POWER_SGD_RANK}",
            kind="gradients",
            before=state,
            after=state.with_levers(lever),
            change=Change(levers=lever),
            # What it has lost so far.
            extra_gib=load.trainable * (1 - low_rank.rest) * _FP32_BYTES / _BYTES_PER_GIB,
            effects=(_LOW_RANK.found(None),),
        )


def _average(state: TrainingState) -> Iterator[TuningOption]:
    scenario, settings, load = state.scenario, state.settings, state.calibration.work.load
    is_ddp = scenario.strategy is Strategy.DDP and scenario.layout.nodes > 1 and settings.precision != "fp16"
    for averaging in _AVERAGINGS if is_ddp and settings.levers.compression is None else ():
        lever, outer = Levers(averaging=averaging), averaging.outer_lr is not None
        width = f" in {averaging.dtype}" if averaging.dtype is not None else ""
        # On the first worker of each node: the parameters of the last round, and an outer optimizer's momentum.
        copies = (outer or averaging.dtype is not None) + outer
        yield TuningOption(
            name=f"{'DiLoCo' if outer else 'local SGD'} every {averaging.every} steps{width}",
            kind="outer" if outer else "averaging",
            before=state,
            after=state.with_levers(lever),
            change=Change(levers=lever),
            extra_gib=copies * load.trainable * _FP32_BYTES / _BYTES_PER_GIB,
            effects=(_trained_apart(averaging),),
        )


def _trained_apart(averaging: Averaging) -> Finding:
    """The loss of two nodes is by benchmarks/averaging.py."""
    fewest, most = step_efficiency(averaging)
    steps = f"{format_figure(2 * fewest)} to {format_figure(2 * most)} steps of one node"
    measured = "" if most == 1 else f"; in a benchmark, a step of two nodes replaced {steps}"
    rule = _LOCAL_SGD if averaging.outer_lr is None else _DILOCO
    return rule.found(None, measured=measured, step_efficiency=most)


def _accumulate(state: TrainingState) -> Iterator[TuningOption]:
    for multiple in _MULTIPLES[1:2] if repeated_calls(state) else _MULTIPLES:
        more = {"accumulation": state.scenario.accumulation * multiple}
        after = state.with_(more, more)
        if _exceeds_data(after):
            return
        overrides = (f"gradient_accumulation_steps={more['accumulation']}",)
        yield TuningOption(
            name=f"gradient accumulation {more['accumulation']}",
            kind="accumulation",
            before=state,
            after=after,
            change=Change(overrides=overrides, deepspeed=after.batch_edits()),
            effects=_batch(state, after, _LARGER_BATCH),
            person=f"{more['accumulation']} micro-batches per step in your script, all but the last of them under "
            "no_sync()",
            remarks=_repeated,
        )


def _exceeds_data(after: TrainingState) -> bool:
    """Whether an epoch would not have a whole step."""
    return after.dataset_samples is not None and after.scenario.samples > after.dataset_samples


def _batch(before: TrainingState, after: TrainingState, rule: Rule = _BATCH) -> tuple[Finding, ...]:
    was, now = before.scenario.samples, after.scenario.samples
    if was == now:
        return ()
    return (rule.found(None, now=f"{now:g}", before=f"{was:g}", samples_before=was, samples=now),)


def _repeated(option: TuningOption) -> Iterator[Finding]:
    collectives, strategy = repeated_calls(option.before), option.before.scenario.strategy
    if not collectives:
        return
    gathers = ["gathers the parameters"] if "all_gather" in collectives else []
    reduces = ["reduces the gradients"] if _REDUCTIONS & set(collectives) else []
    before, after, is_zero2 = option.before.sample_mb(), option.after.sample_mb(), strategy is Strategy.ZERO2
    yield _REPEATED.found(
        None,
        strategy=strategy,
        engine=strategy.engine,
        does=" and ".join([*gathers, *reduces]),
        before=format_figure(before),
        sample_mb_before=before,
        after=format_figure(after),
        sample_mb=after,
        saving=(". The saving comes from the updated parameters, which are gathered only once per step")
        if is_zero2
        else "",
    )


def repeated_calls(state: TrainingState) -> Collection[str]:
    """Collectives that every micro-batch calls; empty where none does, and accumulation cuts the traffic."""
    calls = state.calibration.work.calls_of(state.scenario.strategy, state.scenario.layout)
    return {call.collective for call in calls if call.per_micro_batch}


def _overlap(state: TrainingState) -> Iterator[TuningOption]:
    deepspeed = state.deepspeed
    if deepspeed is not None and state.scenario.strategy.engine == "DeepSpeed" and not state.scenario.overlap:
        # A second buffer of a whole bucket (stage_1_and_2.py); without a known size of the bucket none is told.
        elements, width = deepspeed.reduce_bucket_elements, state.calibration.work.load.gradient_bytes
        on = {"overlap": True}
        yield TuningOption(
            name="overlap_comm",
            kind="overlap",
            before=state,
            after=state.with_(on, on, deepspeed=_replace(deepspeed, overlap_comm=True)),
            change=Change(deepspeed=("zero_optimization.overlap_comm=true",)),
            extra_gib=None if elements is None else elements * width / _BYTES_PER_GIB,
            person='"overlap_comm": true under "zero_optimization" of your DeepSpeed JSON',
            remarks=lambda _: (_ONE_BUCKET.found(None),),
        )


def _larger_buckets(state: TrainingState) -> Iterator[TuningOption]:
    scenario, work = state.scenario, state.calibration.work
    if scenario.strategy is not Strategy.DDP or scenario.bucket_bytes is not None:
        return
    calls = [call for call in work.calls_of(scenario.strategy, scenario.layout) if call.collective == "all_reduce"]
    if sum(call.times for call in calls) > _FEW_CALLS:
        yield TuningOption(
            name=f"buckets of {_LARGE_BUCKET_MIB} MiB",
            kind="buckets",
            before=state,
            after=state.with_({"bucket_bytes": _LARGE_BUCKET_MIB * _MIB}),
            change=Change(overrides=(f"ddp_bucket_cap_mb={_LARGE_BUCKET_MIB}",)),
            person=f"DistributedDataParallel(..., bucket_cap_mb={_LARGE_BUCKET_MIB})",
            remarks=lambda _: (_FEWER_MESSAGES.found(None),),
        )


def _gather_less(state: TrainingState) -> Iterator[TuningOption]:
    script, workers = state.calibration.script, state.scenario.layout.workers
    overrides: list[str] = []
    left: list[Call] = []
    for call in script:
        per_worker = call.size_bytes / workers if call.collective == "all_gather" else 0.0
        if per_worker == _COUNT_BYTES and call.times >= _OFTEN:
            overrides.append("average_tokens_across_devices=false")
            left.append(_replace(call, times=max(0.0, call.times - 1)))
        elif per_worker == _LOGGED_BYTES and call.times >= _OFTEN:
            overrides.append(f"logging_steps={_LOG_EVERY}")
            left.append(_replace(call, times=call.times / _LOG_EVERY))
        else:
            left.append(call)
    if overrides and state.scenario.layout.nodes > 1:
        yield TuningOption(
            name="fewer small collectives",
            kind="script",
            before=state,
            after=state.with_(calibration=_replace(state.calibration, script=tuple(left))),
            change=Change(overrides=tuple(overrides)),
            effects=(_EQUAL_WEIGHT.found(None),),
            person=SMALLER,
            remarks=_small_calls,
        )


def _small_calls(option: TuningOption) -> Iterator[Finding]:
    before, after = per_step(option.before), per_step(option.after)
    yield _SMALL_CALLS.found(
        None, before=format_figure(before), calls_before=before, after=format_figure(after), calls=after
    )


def per_step(state: TrainingState) -> float:
    """How many small calls the script itself makes in a step."""
    return sum(call.times for call in state.calibration.script)


def script_ms(state: TrainingState) -> float:
    """What the small calls of the script itself take of a step."""
    calibration, scenario = state.calibration, state.scenario
    return comm_times(calibration.network, calibration.script, scenario.link, scenario.layout).after_ms


def _larger_batch(state: TrainingState) -> Iterator[TuningOption]:
    batch = state.scenario.per_device_batch * 2
    after = state.with_({"per_device_batch": batch}, {"per_device_batch": int(batch)})
    if _exceeds_data(after):
        return
    change = Change(overrides=(f"per_device_train_batch_size={batch:g}",), deepspeed=after.batch_edits())
    yield TuningOption(
        name=f"per-device batch {batch:g}",
        kind="batch",
        before=state,
        after=after,
        # Of a batch that is no whole number none was asked for.
        change=change if batch == int(batch) else None,
        extra_gib=None,
        effects=_batch(state, after, _LARGER_BATCH),
        person=f"{batch:g} samples per micro-batch in your script",
        remarks=lambda _: (_ACTIVATIONS.found(None),),
    )


def _lora(state: TrainingState) -> Iterator[TuningOption]:
    if state.settings.method != "full" or state.subject is None or state.is_script:
        return
    try:
        calibration = vary(
            state.calibration, state.subject, strategy=state.scenario.strategy, method=f"lora:{_LORA_RANK}"
        )
    except UsageError:
        # Of a model whose shape is not known nothing is known.
        return
    trainable = calibration.work.load.trainable
    yield TuningOption(
        name=f"rank-{_LORA_RANK} LoRA (changes what is trained)",
        kind="method",
        before=state,
        after=state.with_(settings={"method": "lora", "lora_rank": _LORA_RANK}, calibration=calibration),
        change=Change(overrides=("finetuning_type=lora", f"lora_rank={_LORA_RANK}")),
        effects=(_ADAPTER.found(None, millions=format_figure(trainable / 1e6), trainable=trainable),),
    )


def _strategies(state: TrainingState) -> Iterator[TuningOption]:
    today = state.scenario.strategy
    for strategy in _MOVES.get(today, ()) if state.scenario.layout.workers > 1 else ():
        # ZeRO-1 and ZeRO-2 send alike unless micro-batches are accumulated.
        if strategy is Strategy.ZERO1 and state.scenario.accumulation == 1:
            continue
        if strategy.gathers_in_node and not _has_insides(state.scenario.layout):
            continue
        change, person = _to_strategy(state, strategy)
        try:
            after = _under(state, strategy, change)
        except UsageError:
            # What it would send is unknown.
            continue
        yield TuningOption(
            name=f"{strategy} instead of {today}",
            kind="strategy",
            before=state,
            after=after,
            change=change,
            person=person,
            remarks=_memory,
        )


def _has_insides(layout: Layout) -> bool:
    """Whether there is communication inside nodes and between them, in equal groups."""
    return layout.nodes > 1 and layout.workers_per_node > 1 and not layout.unequal


def _to_strategy(state: TrainingState, strategy: Strategy) -> tuple[Change, str]:
    """The change, and what a script's author does."""
    layout, today = state.scenario.layout, state.scenario.strategy
    if strategy is Strategy.DDP:
        none = ("deepspeed=null",) if today.engine == "DeepSpeed" else ("fsdp=null", "fsdp_config=null")
        return Change(overrides=none), "wrap the model in torch's DistributedDataParallel in your script"
    if strategy is Strategy.HYBRID_SHARD:
        return _to_hybrid_shard(state), (
            "sharding_strategy=HYBRID_SHARD of FullyShardedDataParallel, or fully_shard over a mesh of "
            f"{layout.nodes} x {layout.workers_per_node}"
        )
    key, value = ("stage", strategy.stage) if strategy.stage != today.stage else (HPZ_WORKERS, layout.workers_per_node)
    change = Change(deepspeed=(f"zero_optimization.{key}={value}",))
    return change, f'"{key}": {value} under "zero_optimization" of your DeepSpeed JSON'


def _to_hybrid_shard(state: TrainingState) -> Change:
    """FSDP 1 is told by accelerate's variable, version 2 by the sizes of its mesh."""
    layout = state.scenario.layout
    if state.calibration.work.load.fsdp_version != 1:
        sizes = {"DP_REPLICATE": layout.nodes, "DP_SHARD": layout.workers_per_node}
        mesh = {f"PARALLELISM_CONFIG_{name}_SIZE": str(size) for name, size in sizes.items()}
        return Change(env={"ACCELERATE_USE_PARALLELISM_CONFIG": "true", **mesh})
    word, named = fsdp_word(Strategy.HYBRID_SHARD), "full_shard auto_wrap"
    if state.subject is not None and state.subject.job is not None:
        named = str(state.subject.job.arguments.get("fsdp") or named)
    words = named.replace(fsdp_word(Strategy.FSDP), word)
    return Change(overrides=(f"fsdp={words}",), env={"FSDP_SHARDING_STRATEGY": word.upper()})


def _memory(option: TuningOption) -> Iterator[Finding]:
    old, new, memory = option.before.memory_need(), option.after.memory_need(), option.before.gpu_memory
    if old is None or new is None:
        yield _UNKNOWN_MEMORY.found(None)
        return
    before, after = format_figure(old.total_gib), format_figure(new.total_gib)
    yield _STATES.found(None, before=before, states_gib_before=old.total_gib, after=after, states_gib=new.total_gib)
    if memory is None:
        return
    is_measured = memory.peak_gib is not None and option.expected_gib is not None
    expected_gib = option.expected_gib if is_measured else None
    yield (_FITS_NOT if option.fits is False else _FITS).found(
        None,
        expected=""
        if expected_gib is None
        else f"with the measured activations ({format_figure(expected_gib)} GiB in total), ",
        expected_gib=expected_gib,
        gpu=format_figure(memory.total_gib),
        gpu_gib=memory.total_gib,
        condition="" if is_measured else ", if the activations fit too",
    )


def _under(state: TrainingState, strategy: Strategy, change: Change) -> TrainingState:
    calibration, scenario = state.calibration, {"strategy": strategy, "overlap": state.scenario.overlap}
    deepspeed = None if strategy is Strategy.DDP else _edited(state, change)
    if state.subject is not None:
        calibration = vary(calibration, state.subject, strategy=strategy)
    if strategy is Strategy.DDP:
        is_known = strategy in calibration.work.calls
        scenario |= {"bucket_bytes": None if is_known else _DDP_BUCKET_BYTES, "overlap": True}
    elif deepspeed is not None:
        scenario["overlap"] = deepspeed.overlap_comm
    settings = {"strategy": str(strategy), "overlap": scenario["overlap"]}
    return state.with_(scenario, settings, calibration=calibration, deepspeed=deepspeed)


def _edited(state: TrainingState, change: Change) -> DeepSpeedConfig | None:
    """Its DeepSpeed JSON with the change: what it leaves out, stage 3 has otherwise than stage 2."""
    job = state.subject.job if state.subject is not None else None
    if job is None or job.deepspeed_text is None:
        return state.deepspeed
    try:
        return parse_deepspeed(edit_deepspeed(job.deepspeed_text, parse_deepspeed_edits(change.deepspeed)))
    except JobError:
        return state.deepspeed


def cluster_options(state: TrainingState) -> Iterator[TuningOption]:
    """A faster link, a node more or fewer, one node alone, every node full: those that apply. Most take a person."""
    layout = state.scenario.layout
    nodes, workers = layout.nodes, layout.on(1).workers
    alone = on_one_node(state.calibration, state.scenario).layout
    if nodes > 1:
        yield from _faster_links(state)
        yield one_node(state)
        if alone.workers > workers and not layout.unequal:
            full = Layout(nodes=nodes, workers_per_node=alone.workers)
            yield _placed(state, full, f"{alone.workers} workers on each node")
    # One fewer than two is one node; and without a network that was measured or stated nothing is known of a second.
    fewer = (nodes - 1,) if nodes > 2 else ()  # noqa: PLR2004
    more = (nodes + 1,) if nodes > 1 or len(state.slots) > 1 else ()
    for count in (*fewer, *more):
        yield _placed(state, layout.on(count), f"{count} nodes")


def one_node(state: TrainingState) -> TuningOption:
    """One node alone, with all the workers that it is known to have."""
    return _placed(state, on_one_node(state.calibration, state.scenario).layout, "one node")


def _faster_links(state: TrainingState) -> Iterator[TuningOption]:
    link = state.scenario.link
    faster = [rate for rate in _STANDARD_GBIT_PER_S if rate > link.gbit_per_s * _CLEARLY_FASTER]
    for rate in faster[:_MOST_LINKS]:
        yield TuningOption(
            name=f"a {format_rate(rate)} link",
            kind="link",
            before=state,
            after=state.with_({"link": _replace(link, gbit_per_s=float(rate))}),
            effects=(_UNCHANGED.found(None), _EQUIPMENT.found(None)),
            person=f"NICs and a switch with {format_rate(rate)} instead of {format_rate(link.gbit_per_s)}",
            remarks=_worth,
        )


def _worth(option: TuningOption) -> Iterator[Finding]:
    needed, scenario = beats_one(option.before.calibration, option.before.scenario)
    workers = format_count(scenario.layout.workers_per_node, "worker")
    is_above = needed.high is not None and needed.high < option.before.scenario.link.gbit_per_s
    yield _BREAK_EVEN.found(
        None,
        nodes=scenario.layout.nodes,
        each=f"{scenario.layout.workers} workers" if scenario.layout.unequal else f"{workers} each",
        link=link_words(needed),
        break_even_gbit_per_s=needed.value,
        exceeds=", which this link exceeds" if is_above else "",
    )


def _placed(state: TrainingState, placed: Layout, name: str) -> TuningOption:
    layout = state.scenario.layout
    # A single worker has nobody to send gradients to, and on one node they pass no network.
    levers = {} if placed.nodes > 1 else {"levers": NONE}
    then = state.with_({"layout": placed, **levers}, levers)
    change = Change(
        deepspeed=then.batch_edits(),
        nodes=placed.nodes if placed.nodes != layout.nodes else None,
        workers_per_node=placed.workers_per_node if placed != layout.on(placed.nodes) else None,
    )
    effects, workers = _batch(state, then), placed.workers_per_node
    if placed.nodes < layout.nodes:
        effects = (*(effects or (_UNCHANGED.found(None),)), _FREED.found(None))
    short, person = short_nodes(state, placed), ""
    if lacking_nodes(state, placed):
        person = f"add a similar node to the hostfile ({placed.nodes} in total)"
    elif short:
        which = f"node {short[0]}" if len(short) == 1 else f"nodes {fold_numbers(short)}"
        person = f"set {workers} ids in gpus=, or slots={workers}, in the hostfile for {which}; then {change.options}"
    is_full = placed.nodes == layout.nodes and placed.workers > layout.workers
    return TuningOption(
        name=name,
        kind="nodes",
        before=state,
        after=then,
        change=None if person else change,
        by_hand=change if person else None,
        effects=effects,
        person=person,
        remarks=lambda _: (_FULL_NODES.found(None),) if is_full else (),
    )


def lacking_nodes(state: TrainingState, placed: Layout) -> int:
    """How many nodes the hostfile has too few."""
    return max(0, placed.nodes - max(state.scenario.layout.nodes, len(state.slots)))


def short_nodes(state: TrainingState, placed: Layout) -> tuple[int, ...]:
    """Node ranks whose line of the hostfile gives them fewer workers."""
    wanted = zip(state.slots, placed.counts, strict=False)
    return tuple(rank for rank, (slots, count) in enumerate(wanted) if slots is not None and slots < count)
