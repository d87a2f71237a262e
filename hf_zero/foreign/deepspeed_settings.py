"""Translates DeepSpeed's settings, from its JSON file and under their names in an accelerate config."""

from collections.abc import Mapping
from typing import Any

from .translation import (
    Rule,
    Table,
    Translation,
    instead,
    is_off,
    mapped,
    never,
    one_of,
    same,
    switch,
    unneeded,
    unsupported,
    whole,
)

_ARGUMENTS = "set {} in your training arguments or your script"
_ALWAYS = "always the case here"
_BUCKETS = "`bucket_bytes: auto` sizes buckets for the model, the ranks and the device"
_ONE_MESSAGE = "the small parameters of a layer are gathered in one message with its large ones"
_SCHEDULE = "gathered layers are freed and prefetched one layer at a time: `reshard_after_forward`, `prefetch_units`"
_INSIDE = "a detail of DeepSpeed's own code"
_REPORTS = "Trainer's log and `engine.memory_report()` show it; trackers are set in accelerate or Trainer (`report_to`)"
SEQUENCES = "`hf-zero run --sp N` or `ZeroPlugin(sp_size=N)` sets it"
_NOT_ZERO = "not part of sharding; hf_zero leaves it to the script"


def said_by(argument: str) -> Rule:
    """Makes a rule for a key which training arguments or the script replace."""
    return never(_ARGUMENTS.format(argument))


def tier(name: str) -> Rule:
    """Makes a rule for an offload device: none, cpu, or nvme with the folder from the same section."""

    def rule(value: Any, section: Mapping[Any, Any]) -> Translation:
        if is_off(value):
            return unneeded("off, or left at its default")
        if value not in ("cpu", "nvme"):
            return unsupported(f"`offload.{name}` takes none, cpu or nvme")
        path = next((section[key] for key in _FOLDERS[name] if section.get(key)), None)
        folder = {"offload.nvme_path": path} if value == "nvme" and path is not None else {}
        return mapped({f"offload.{name}": value, **folder})

    return rule


_FOLDERS = {
    "optimizer": ("nvme_path", "offload_optimizer_nvme_path"),
    "params": ("nvme_path", "offload_param_nvme_path"),
}


def group(value: Any, section: Mapping[Any, Any]) -> Translation:
    """Translates `mics_shard_size`; -1 is off."""
    if is_off(value) or value == -1:
        return unneeded("off, or left at its default")
    return mapped({"comm.shard_group_size": whole(value)})


def secondary(value: Any, section: Mapping[Any, Any]) -> Translation:
    """Translates `zero_hpz_partition_size`; 1 is off."""
    if is_off(value) or value == 1:
        return unneeded("off, or left at its default")
    return mapped({"comm.secondary_shard": "node"}, "a second shard among the ranks of a node")


_OFFLOADED = {
    "nvme_path": same("offload.nvme_path"),
    "pin_memory": never("host memory that a GPU copies from is always pinned"),
    "buffer_count": never("three buckets are in memory at once"),
    "buffer_size": never("buffers have the size of a bucket"),
    "fast_init": never(_INSIDE),
}


def stage(value: Any, section: Mapping[Any, Any]) -> Translation:
    """Translates `stage`. `auto` stays `auto`: left to the default, no stage would be chosen."""
    return mapped({"stage": "auto"}) if value == "auto" else same("stage", whole)(value, section)


_ZERO: dict[str, Rule] = {
    "stage": stage,
    "offload_optimizer.device": tier("optimizer"),
    "offload_optimizer.ratio": same("offload.ratio"),
    "offload_optimizer.pipeline_read": never("reads of files always run ahead"),
    "offload_optimizer.pipeline_write": never("writes of files always run in the background"),
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
    "mics_hierarchical_params_gather": instead("remove it: shards of a group are gathered within the group"),
    "zero_hpz_partition_size": secondary,
    "zero_quantized_weights": switch({"comm.weights": "int8"}),
    "zero_quantized_gradients": switch({"comm.gradients": "int8"}),
    "zero_quantized_nontrainable_weights": instead("remove it: frozen weights are sent in their own dtype"),
    "stage3_gather_16bit_weights_on_model_save": never("a saved model is always complete"),
    "gather_16bit_weights_on_model_save": never("a saved model is always complete"),
    "stage3_max_live_parameters": never(_SCHEDULE),
    "stage3_max_reuse_distance": never(_SCHEDULE),
    "stage3_prefetch_bucket_size": never(_SCHEDULE),
    "stage3_module_granularity_threshold": never(
        "`unit_bytes` and `unit_modules` define which layers are gathered together"
    ),
    "module_granularity_threshold": never("`unit_bytes` and `unit_modules` define which layers are gathered together"),
    "max_live_parameters": never(_SCHEDULE),
    "max_reuse_distance": never(_SCHEDULE),
    "prefetch_bucket_size": never(_SCHEDULE),
    "model_persistence_threshold": never(_ONE_MESSAGE),
    "reduce_bucket_size": never(_BUCKETS),
    "allgather_bucket_size": never(_BUCKETS),
    "sub_group_size": never("with offloaded state, the optimizer steps one bucket at a time"),
    "overlap_comm": never("gradients are always sent during backward"),
    "contiguous_gradients": never(_ALWAYS),
    "reduce_scatter": never(_ALWAYS),
    "allgather_partitions": never(_ALWAYS),
    "round_robin_gradients": never("a shard of each gradient bucket is reduced by each rank"),
    "use_multi_rank_bucket_allreduce": never(_ALWAYS),
    "use_all_reduce_for_fetch_params": never(_INSIDE),
    "stage3_use_all_reduce_for_fetch_params": never(_INSIDE),
    "elastic_checkpoint": never("checkpoints load on any number of ranks and at any stage"),
    "load_from_fp32_weights": never("checkpoints contain float32 masters, and runs resume from them"),
    "ignore_unused_parameters": never("unused parameters are always found"),
    "legacy_stage1": never(_INSIDE),
    "grad_hooks": never(_ALWAYS),
    "memory_efficient_linear": never("saved tensors of a gathered layer are views that cost no memory"),
    "pipeline_loading_checkpoint": never("each rank reads its own part of a checkpoint"),
    "override_module_apply": never("`hf_zero.init` builds models that are too large for one device"),
    "log_trace_cache_warnings": never(_INSIDE),
    "leaf_module": instead("name the classes that are gathered together in `unit_modules`"),
    "zenflow": instead("remove it: each step uses all of its gradients, in host memory"),
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
    "seq_parallel_communication_data_type": never("heads are exchanged in their own dtype"),
    "prescale_gradients": never("gradients are divided before they are added, as under DDP"),
    "gradient_predivide_factor": never("gradients are divided before they are added, as under DDP"),
    "sparse_gradients": instead("remove it: dense gradients of embeddings are sharded like all others"),
    "data_types": instead(
        "`param_dtype` and `reduce_dtype` set dtypes; gradients are accumulated in the dtype of the parameters"
    ),
    "activation_checkpointing": said_by("activation_checkpointing (gradient_checkpointing before transformers 5.23)"),
    "zero_allow_untested_optimizer": never("a trial step shows how an optimizer can be sharded"),
    "zero_force_ds_cpu_optimizer": never("the script's own optimizer always makes the step"),
    "checkpoint": never("`checkpoint` of hf_zero has different settings; their defaults suffice"),
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
    "sequence_parallel_size": instead(SEQUENCES),
    "pipeline": instead("stage 3 shards parameters over data-parallel ranks; layers are not assigned to ranks"),
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
    "zero3_init_flag": never("`with hf_zero.init(plugin):` around from_pretrained does the same"),
    "zero3_save_16bit_model": never("a saved model is always complete"),
    "deepspeed_config_file": instead("it holds the settings: migrate that file"),
    "deepspeed_multinode_launcher": never("`accelerate launch` and `torchrun` start ranks on several machines"),
    "deepspeed_hostfile": never("`accelerate launch` and `torchrun` start ranks on several machines"),
    "deepspeed_inclusion_filter": instead("give `accelerate launch` the machines and GPUs"),
    "deepspeed_exclusion_filter": instead("give `accelerate launch` the machines and GPUs"),
    "deepspeed_moe_layer_cls_names": instead("name the classes that are gathered together in `unit_modules`"),
}
"""Keys below `deepspeed_config` of an accelerate config."""
