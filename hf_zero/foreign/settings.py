"""Translates settings of DeepSpeed, FSDP and accelerate, one rule a key."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

# ---- What becomes of one key of another engine's config: kinds of answers, for tables that list the keys ----


class Fate(str, Enum):
    """The three lists of keys."""

    MAPPED = "mapped"
    NOT_NEEDED = "not needed"
    NOT_SUPPORTED = "not supported"


@dataclass(frozen=True)
class Translation:
    """The translation of a key with its value.

    Attributes:
        said: the setting here, why none is needed, or what to do instead.
        settings: dotted names of settings here, and their values.
    """

    fate: Fate
    said: str
    settings: Mapping[str, Any] = field(default_factory=dict)


Rule: TypeAlias = Callable[[Any, Mapping[Any, Any]], Translation]
"""Is given a key's value and the section that the key is in."""

Table: TypeAlias = Mapping[str, Rule]
"""Dotted path of a key → its rule."""


def is_off(value: Any) -> bool:
    """Whether a value leaves a feature off, or to its default."""
    if isinstance(value, Mapping):
        return not value or is_off(value.get("enabled", True))
    return value is None or value is False or value in ("auto", "none", "no", "false", "False", "NO", "None", "", [], 0)


def mapped(settings: Mapping[str, Any], note: str = "") -> Translation:
    said = ", ".join(f"{name}: {value}" for name, value in settings.items())
    return Translation(Fate.MAPPED, said + (f"; {note}" if note else ""), settings)


def unneeded(why: str) -> Translation:
    return Translation(Fate.NOT_NEEDED, why)


def unsupported(instead: str) -> Translation:
    return Translation(Fate.NOT_SUPPORTED, instead)


def never(why: str) -> Rule:
    """Needed for no value."""
    return lambda value, section: unneeded(why)


def instead(what: str) -> Rule:
    """Names a replacement for an unsupported key, which needs nothing if it is off."""
    return lambda value, section: unneeded("off, or left to its default") if is_off(value) else unsupported(what)


def same(name: str, convert: Callable[[Any], Any] = lambda value: value) -> Rule:
    """A setting here with the same meaning, which takes the value."""

    def rule(value: Any, section: Mapping[Any, Any]) -> Translation:
        if value is None or value == "auto":
            return unneeded(f"`{name}` is left to its default")
        return mapped({name: convert(value)})

    return rule


def one_of(values: Mapping[Any, Mapping[str, Any]], otherwise: str, off: str = "off, or left to its default") -> Rule:
    """The settings for a value of a few; text in any case. A value that maps to nothing needs nothing.

    Args:
        otherwise: what to do about any other value.
        off: why a value that is off needs nothing.
    """

    def rule(value: Any, section: Mapping[Any, Any]) -> Translation:
        known = value.upper() if isinstance(value, str) else value
        for each, settings in values.items():
            if type(each) is type(known) and each == known:
                return mapped(settings) if settings else unneeded(off)
        return unneeded(off) if is_off(value) else unsupported(otherwise)

    return rule


def switch(settings: Mapping[str, Any], off: str = "off, or left to its default") -> Rule:
    return lambda value, section: unneeded(off) if is_off(value) else mapped(settings)


def whole(value: Any) -> Any:
    """Converts 1e5, as JSON may have it, to a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# ---- DeepSpeed's settings: its JSON file, and the names that they have in an accelerate config ----

_ARGUMENTS = "your training arguments or your script say it: {}"
_ALWAYS = "always so here"
_BUCKETS = "`bucket_bytes: auto` sizes buckets for the model, the ranks and the device"
_ONE_MESSAGE = "the small parameters of a layer are gathered in one message with its large ones"
_SCHEDULE = "gathered layers are dropped and prefetched a layer at a time: `reshard_after_forward`, `prefetch_units`"
_INSIDE = "a detail of DeepSpeed's own code"
_REPORTS = (
    "Trainer's log and `engine.memory_report()` report; trackers are those of accelerate or Trainer (`report_to`)"
)
_SEQUENCES = "`hf-zero run --sp N` or `ZeroPlugin(sp_size=N)` says it"
_NOT_ZERO = "it is no part of sharding; hf_zero leaves it to the script"


def said_by(argument: str) -> Rule:
    """Said by training arguments or the script."""
    return never(_ARGUMENTS.format(argument))


def tier(name: str) -> Rule:
    """Translates a place: none, cpu, or nvme with the folder beside it."""

    def rule(value: Any, section: Mapping[Any, Any]) -> Translation:
        if is_off(value):
            return unneeded("off, or left to its default")
        if value not in ("cpu", "nvme"):
            return unsupported(f"`offload.{name}` takes none, cpu or nvme")
        beside = next((section[key] for key in _FOLDERS[name] if section.get(key)), None)
        folder = {"offload.nvme_path": beside} if value == "nvme" and beside is not None else {}
        return mapped({f"offload.{name}": value, **folder})

    return rule


_FOLDERS = {
    "optimizer": ("nvme_path", "offload_optimizer_nvme_path"),
    "params": ("nvme_path", "offload_param_nvme_path"),
}


def group(value: Any, section: Mapping[Any, Any]) -> Translation:
    """`mics_shard_size`, where -1 is off."""
    if is_off(value) or value == -1:
        return unneeded("off, or left to its default")
    return mapped({"comm.shard_group_size": whole(value)})


def secondary(value: Any, section: Mapping[Any, Any]) -> Translation:
    """`zero_hpz_partition_size`, where 1 is off."""
    if is_off(value) or value == 1:
        return unneeded("off, or left to its default")
    return mapped({"comm.secondary_shard": "node"}, "a second shard among the ranks of a node")


_OFFLOADED = {
    "nvme_path": same("offload.nvme_path"),
    "pin_memory": never("host memory that a GPU copies from is always pinned"),
    "buffer_count": never("three buckets are in memory at a time"),
    "buffer_size": never("buffers have the size of a bucket"),
    "fast_init": never(_INSIDE),
}


def stage(value: Any, section: Mapping[Any, Any]) -> Translation:
    """`auto` is chosen here, too; left to a default, no stage would be chosen."""
    return mapped({"stage": "auto"}) if value == "auto" else same("stage", whole)(value, section)


_ZERO: dict[str, Rule] = {
    "stage": stage,
    "offload_optimizer.device": tier("optimizer"),
    "offload_optimizer.ratio": same("offload.ratio"),
    "offload_optimizer.pipeline_read": never("reads of files always run ahead"),
    "offload_optimizer.pipeline_write": never("writes of files always run behind"),
    "offload_optimizer.pipeline": never("reads and writes of files always overlap"),
    "offload_param.device": tier("params"),
    "offload_param.max_in_cpu": never("parameters in files pass through a few buffers"),
    **{f"offload_optimizer.{key}": rule for key, rule in _OFFLOADED.items()},
    **{f"offload_param.{key}": rule for key, rule in _OFFLOADED.items()},
    "cpu_offload": switch({"offload.optimizer": "cpu"}),
    "cpu_offload_params": switch({"offload.params": "cpu"}),
    "cpu_offload_use_pin_memory": never("host memory that a GPU copies from is always pinned"),
    "stage3_param_persistence_threshold": never(_ONE_MESSAGE),
    "param_persistence_threshold": never(_ONE_MESSAGE),
    "mics_shard_size": group,
    "mics_hierarchical_params_gather": instead("leave it out: shards of a group are gathered within the group"),
    "zero_hpz_partition_size": secondary,
    "zero_quantized_weights": switch({"comm.weights": "int8"}),
    "zero_quantized_gradients": switch({"comm.gradients": "int8"}),
    "zero_quantized_nontrainable_weights": instead("leave it out: frozen weights travel in their own dtype"),
    "stage3_gather_16bit_weights_on_model_save": never("a saved model is always complete"),
    "gather_16bit_weights_on_model_save": never("a saved model is always complete"),
    "stage3_max_live_parameters": never(_SCHEDULE),
    "stage3_max_reuse_distance": never(_SCHEDULE),
    "stage3_prefetch_bucket_size": never(_SCHEDULE),
    "stage3_module_granularity_threshold": never("`unit_bytes` and `unit_modules` are what is gathered together"),
    "module_granularity_threshold": never("`unit_bytes` and `unit_modules` are what is gathered together"),
    "max_live_parameters": never(_SCHEDULE),
    "max_reuse_distance": never(_SCHEDULE),
    "prefetch_bucket_size": never(_SCHEDULE),
    "model_persistence_threshold": never(_ONE_MESSAGE),
    "reduce_bucket_size": never(_BUCKETS),
    "allgather_bucket_size": never(_BUCKETS),
    "sub_group_size": never("the optimizer steps a bucket at a time where its state is offloaded"),
    "overlap_comm": never("gradients always travel during backward"),
    "contiguous_gradients": never(_ALWAYS),
    "reduce_scatter": never(_ALWAYS),
    "allgather_partitions": never(_ALWAYS),
    "round_robin_gradients": never("a shard of each gradient bucket is reduced by each rank"),
    "use_multi_rank_bucket_allreduce": never(_ALWAYS),
    "use_all_reduce_for_fetch_params": never(_INSIDE),
    "stage3_use_all_reduce_for_fetch_params": never(_INSIDE),
    "elastic_checkpoint": never("checkpoints load on any number of ranks and at any stage"),
    "load_from_fp32_weights": never("checkpoints hold float32 masters, and are resumed from them"),
    "ignore_unused_parameters": never("unused parameters are always found"),
    "legacy_stage1": never(_INSIDE),
    "grad_hooks": never(_ALWAYS),
    "memory_efficient_linear": never("saved tensors of a gathered layer are views that cost no memory"),
    "pipeline_loading_checkpoint": never("each rank reads its own part of a checkpoint"),
    "override_module_apply": never("`hf_zero.init` builds models that are too large for one device"),
    "log_trace_cache_warnings": never(_INSIDE),
    "leaf_module": instead("name the classes that are gathered together in `unit_modules`"),
    "zenflow": instead("`offload.speculate_bytes` steps in host memory during backward, to the same bits"),
}

OF_JSON: Table = {
    **{f"zero_optimization.{path}": rule for path, rule in _ZERO.items()},
    "train_batch_size": said_by("per_device_train_batch_size"),
    "train_micro_batch_size_per_gpu": said_by("per_device_train_batch_size"),
    "gradient_accumulation_steps": said_by("gradient_accumulation_steps"),
    "gradient_clipping": said_by("max_grad_norm"),
    "optimizer": said_by("optim, learning_rate, weight_decay and the adam_ arguments"),
    "scheduler": said_by("lr_scheduler_type and warmup_steps"),
    "bf16": said_by("bf16"),
    "bfloat16": said_by("bf16"),
    "fp16": said_by("fp16; the loss is scaled by torch's GradScaler"),
    "torch_autocast": said_by("bf16 or fp16"),
    "amp": instead("bf16 or fp16 in your training arguments"),
    "communication_data_type": one_of(
        {
            "FP16": {"reduce_dtype": "float16"},
            "BF16": {"reduce_dtype": "bfloat16"},
            "BFP16": {"reduce_dtype": "bfloat16"},
            "FP32": {"reduce_dtype": "float32"},
        },
        "`reduce_dtype` takes float32, bfloat16 or float16",
    ),
    "seq_parallel_communication_data_type": never("there is no sequence parallelism here"),
    "prescale_gradients": never("gradients are divided before they are added, as under DDP"),
    "gradient_predivide_factor": never("gradients are divided before they are added, as under DDP"),
    "sparse_gradients": instead("leave it out: dense gradients of embeddings are sharded like all others"),
    "data_types": instead(
        "`param_dtype` and `reduce_dtype` say dtypes; gradients are added up in that of the parameters"
    ),
    "activation_checkpointing": said_by("activation_checkpointing (gradient_checkpointing before transformers 5.23)"),
    "zero_allow_untested_optimizer": never("a trial step shows how an optimizer can be sharded"),
    "zero_force_ds_cpu_optimizer": never("the script's own optimizer steps, wherever its state is"),
    "checkpoint": never("`checkpoint` of hf_zero has other settings, whose defaults do"),
    "load_universal_checkpoint": never("checkpoints load on any number of ranks and at any stage"),
    "aio": never("files are read and written with the system's own calls"),
    "dataloader_drop_last": said_by("dataloader_drop_last"),
    "steps_per_print": said_by("logging_steps"),
    "compile": said_by("torch_compile"),
    "disable_allgather": never(_INSIDE),
    "graph_harvesting": never(_INSIDE),
    "use_data_before_expert_parallelism": never(_INSIDE),
    "dump_state": never(_REPORTS),
    **{key: never(_REPORTS) for key in ("wall_clock_breakdown", "memory_breakdown", "flops_profiler", "comms_logger")},
    **{key: never(_REPORTS) for key in ("tensorboard", "wandb", "csv_monitor", "comet", "monitor_config")},
    **{key: instead(_NOT_ZERO) for key in ("elasticity", "autotuning", "hybrid_engine", "nebula", "inference")},
    **{key: instead(_NOT_ZERO) for key in ("curriculum_learning", "data_efficiency", "progressive_layer_drop")},
    **{key: instead(_NOT_ZERO) for key in ("compression_training", "quantize_training", "eigenvalue", "pld")},
    "tensor_parallel": instead("stage 3 shards parameters over data-parallel ranks; layers are not split"),
    "sequence_parallel_size": instead(_SEQUENCES),
    "pipeline": instead("stage 3 shards parameters over data-parallel ranks; layers are not dealt to ranks"),
    "expert_parallel": instead("stage 3 shards experts like all parameters"),
}
"""Keys of a JSON file for DeepSpeed."""

IN_ACCELERATE: Table = {
    "seq_parallel_communication_data_type": never("heads are exchanged in their own dtype"),
    "zero_stage": _ZERO["stage"],
    "offload_optimizer_device": tier("optimizer"),
    "offload_optimizer_nvme_path": same("offload.nvme_path"),
    "offload_param_device": tier("params"),
    "offload_param_nvme_path": same("offload.nvme_path"),
    "gradient_accumulation_steps": said_by("gradient_accumulation_steps"),
    "gradient_clipping": said_by("max_grad_norm, or `accelerator.clip_grad_norm_`"),
    "zero3_init_flag": never("`with hf_zero.init(plugin):` around from_pretrained does the like"),
    "zero3_save_16bit_model": never("a saved model is always complete"),
    "deepspeed_config_file": instead("it holds the settings: migrate that file"),
    "deepspeed_multinode_launcher": never("`accelerate launch` and `torchrun` start ranks on several machines"),
    "deepspeed_hostfile": never("`accelerate launch` and `torchrun` start ranks on several machines"),
    "deepspeed_inclusion_filter": instead("give `accelerate launch` the machines and GPUs"),
    "deepspeed_exclusion_filter": instead("give `accelerate launch` the machines and GPUs"),
    "deepspeed_moe_layer_cls_names": instead("name the classes that are gathered together in `unit_modules`"),
}
"""Keys below `deepspeed_config` of an accelerate config."""


# ---- FSDP's settings: `fsdp_config` of accelerate (with `fsdp_` before each name) and of Trainer ----

_WRAPPING = "layers are found by the model's own list of them; `unit_modules` names others"
_XLA = "hf_zero trains on CPUs and GPUs; leave it out"
_GATHERED = {"stage": 3}
_STRATEGIES: dict[Any, dict[str, Any]] = {
    "FULL_SHARD": _GATHERED,
    "SHARD_GRAD_OP": {"stage": 2},
    "NO_SHARD": {"stage": 0},
    1: _GATHERED,
    2: {"stage": 2},
    3: {"stage": 0},
}
_HYBRID = "set `comm.shard_group_size` to the number of ranks on a node: groups of so many share one copy of the state"


def strategy(value: Any, section: Mapping[Any, Any]) -> Translation:
    """`sharding_strategy`, by name or number."""
    if value in ("HYBRID_SHARD", 4):
        return mapped(_GATHERED, _HYBRID)
    if value in ("HYBRID_SHARD_ZERO2", 5):
        return mapped({"stage": 2}, _HYBRID)
    return one_of(_STRATEGIES, "`stage` takes 0, 1, 2 or 3")(value, section)


def resharding(value: Any, section: Mapping[Any, Any]) -> Translation:
    """`reshard_after_forward`: a switch for FSDP2; FSDP1 has the names of strategies there, and accelerate writes text."""
    if isinstance(value, str) and value.upper() in (*_STRATEGIES, "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"):
        return strategy(value.upper(), section)
    if value is None:
        return unneeded("`reshard_after_forward` is left to its default")
    if value is True or (isinstance(value, str) and value.lower() == "true"):
        return mapped({"reshard_after_forward": True})
    if value is False or (isinstance(value, str) and value.lower() == "false"):
        return mapped({"reshard_after_forward": False})
    return unsupported("`reshard_after_forward` takes true or false")


def layers(value: Any, section: Mapping[Any, Any]) -> Translation:
    """Class names, as a list or as text with commas."""
    if value is None or value in ("", []):
        return unneeded("left to `unit_modules: auto`, which finds the layers")
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    return mapped({"unit_modules": names})


OF_FSDP: Table = {
    "sharding_strategy": strategy,
    "reshard_after_forward": resharding,
    "transformer_layer_cls_to_wrap": layers,
    "offload_params": switch({"offload.params": "cpu", "offload.optimizer": "cpu"}),
    "cpu_offload": switch({"offload.params": "cpu", "offload.optimizer": "cpu"}),
    "version": never("the engine is neither of FSDP's two"),
    "auto_wrap_policy": never(_WRAPPING),
    "min_num_params": never(_WRAPPING),
    "use_orig_params": never("parameters keep their names and shapes"),
    "backward_prefetch": never("`prefetch_units` is how many layers are gathered ahead, also in backward"),
    "backward_prefetch_policy": never("`prefetch_units` is how many layers are gathered ahead, also in backward"),
    "forward_prefetch": never("`prefetch_units` is how many layers are gathered ahead"),
    "limit_all_gathers": never("`prefetch_units` bounds what is gathered at a time"),
    "sync_module_states": never("all ranks begin with rank 0's parameters"),
    "state_dict_type": never("`checkpoint.layout: hf` writes complete models, `sharded` one file a rank"),
    "cpu_ram_efficient_loading": never("`with hf_zero.init(plugin):` around from_pretrained does the like"),
    "activation_checkpointing": said_by("activation_checkpointing (gradient_checkpointing before transformers 5.23)"),
    "ignored_modules": instead("freeze what is not to be trained"),
    "mixed_precision_policy": instead("`param_dtype`, `reduce_dtype` and `gather_dtype` say dtypes"),
    "xla": instead(_XLA),
    "xla_fsdp_settings": instead(_XLA),
    "xla_fsdp_v2": instead(_XLA),
    "xla_fsdp_grad_ckpt": instead(_XLA),
}
"""Keys of an FSDP config, without `fsdp_`."""


# ---- An accelerate config, as `accelerate config` writes it: what is the launcher's stays there ----

_LAUNCHER = "it is the launcher's: leave it in accelerate's config"
_TPU = "hf_zero trains on CPUs and GPUs"
_OF_LAUNCHER = (
    *("compute_environment", "debug", "num_processes", "machine_rank", "num_machines", "gpu_ids", "rdzv_backend"),
    *("main_process_ip", "main_process_port", "main_training_function", "same_network", "enable_cpu_affinity"),
    *("use_cpu", "ipex_config", "mpirun_config", "command_file", "commands", "num_cpu_threads_per_process"),
    *("dynamo_config", "dynamo_backend", "fp8_config", "gradient_accumulation_steps", "mixed_precision", "env"),
)


def kind(value: Any, section: Mapping[Any, Any]) -> Translation:
    """`distributed_type`."""
    if value in ("FSDP", "DEEPSPEED"):
        return unneeded("say MULTI_GPU in accelerate's config: hf_zero comes with the script, or by `-m hf_zero.run`")
    if value in ("MEGATRON_LM", "XLA", "TP"):
        return unsupported(f"{value} splits or places models by itself; two engines cannot own one model")
    return unneeded(_LAUNCHER)


def axis(advice: str) -> Rule:
    """Ranks along an axis, which is the launcher's where sequences are cut, and otherwise refused above 1."""

    def rule(value: Any, section: Mapping[Any, Any]) -> Translation:
        if is_off(value) or value == 1:
            return unneeded("off, or left to its default")
        return unsupported(advice)

    return rule


def shards(value: Any, section: Mapping[Any, Any]) -> Translation:
    """Ranks that accelerate counts beside those of a sequence."""
    if section.get("parallelism_config_sp_size") not in (None, 1):
        return unneeded("state is sharded over all ranks, those of a sequence among them")
    return axis("`comm.shard_group_size` is how many ranks share one copy of the state")(value, section)


OF_PARALLELISM: Table = {
    "dp_replicate_size": shards,
    "dp_shard_size": shards,
    "tp_size": axis("load the model with `hf_zero.parallel_config(tp_size=...)`"),
    "cp_size": axis("context parallelism is not there: take `sp_size`"),
    "cp_backend": never("context parallelism is not there"),
    "cp_comm_strategy": never("context parallelism is not there"),
    "sp_size": never(_SEQUENCES),
    "sp_backend": never("hf_zero cuts sequences by itself"),
    "sp_seq_length": never("sequences have any length"),
    "sp_seq_length_is_variable": never("sequences have any length"),
    "sp_attn_implementation": never("attention is by the model's own `attn_implementation`"),
}
"""Keys below `parallelism_config` of an accelerate config, without `parallelism_config_`."""

OF_ACCELERATE: Table = {
    "distributed_type": kind,
    **{f"fsdp_config.{prefix}{path}": rule for path, rule in OF_FSDP.items() for prefix in ("fsdp_", "")},
    **{f"deepspeed_config.{path}": rule for path, rule in IN_ACCELERATE.items()},
    **{key: never(_LAUNCHER) for key in _OF_LAUNCHER},
    "downcast_bf16": instead(_TPU),
    **{f"tpu_{key}": instead(_TPU) for key in ("name", "zone", "use_cluster", "use_sudo", "vm", "env")},
    "megatron_lm_config": instead("Megatron-LM splits models by itself; two engines cannot own one model"),
    **{f"parallelism_config.parallelism_config_{name}": rule for name, rule in OF_PARALLELISM.items()},
}
"""Keys of an accelerate config."""
