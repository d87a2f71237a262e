"""The request for a plan: model, inputs, world, and the settings to try."""

import inspect
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel

from ..arithmetic.flat import ceil_div
from ..buckets.packed import is_packed
from ..checkpoint.files import reason
from ..config import ConfigError, ZeroConfig, parse_bytes
from ..config.checks import one_of, refuse, whole_number
from ..forecast.fit import PlanError
from ..layout.boxes import Box
from ..versions import is_older
from .search import Machine

# ---- The set-ups that a planner compares: each stage with each tier that the machine has ----


@dataclass(frozen=True, kw_only=True)
class SetUp:
    """A stage and tiers.

    Attributes:
        name: for tables.
        settings: of `ZeroConfig`, nested.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> ZeroConfig:
        return ZeroConfig.from_dict(self.settings)


_TIERS: tuple[tuple[str, Mapping[str, str], tuple[int, ...]], ...] = (
    ("", {}, (0, 1, 2, 3)),
    ("state cpu", {"optimizer": "cpu"}, (1, 2, 3)),
    ("all cpu", {"optimizer": "cpu", "params": "cpu"}, (3,)),
    ("state nvme", {"optimizer": "nvme"}, (1, 2, 3)),
    ("all nvme", {"optimizer": "nvme", "params": "nvme"}, (3,)),
)


def set_ups(kept: Mapping[str, Any], *, world_size: int, on_host: bool, nvme_path: str | None) -> list[SetUp]:
    """Lists all set-ups that agree with the user's settings.

    Args:
        kept: settings that stay as they are, nested; a stage among them leaves no other.
        on_host: the training device is the host, where state in host memory is no other place.
        nvme_path: a folder for files; None where there is none.

    Raises:
        ConfigError: what is kept contradicts itself.
    """
    said = dict(kept.get("offload") or {})
    tiers_said = {name: said[name] for name in ("optimizer", "params") if said.get(name, "none") != "none"}
    found: list[SetUp] = []
    fault: ConfigError | None = None
    for words, tiers, stages in _TIERS:
        in_files = "nvme" in tiers.values()
        if tiers_said and any(tiers.get(name) != place for name, place in tiers_said.items()):
            continue
        if not tiers_said and (("cpu" in tiers.values() and on_host) or (in_files and nvme_path is None)):
            continue
        for stage in stages:
            if kept.get("stage", stage) != stage or (world_size == 1 and stage in (1, 2) and not tiers):
                continue
            offload = {**tiers, **said}
            if in_files:
                offload.setdefault("nvme_path", nvme_path)
            settings = {**kept, "stage": stage, **({"offload": offload} if offload else {})}
            set_up = SetUp(name=f"stage {stage}{f', {words}' if words else ''}", settings=settings)
            try:
                set_up.config  # noqa: B018
            except ConfigError as error:
                # A setting of stage 3 leaves no other stage, and one that no stage takes is said below.
                fault = error
                continue
            found.append(set_up)
    if not found and fault is not None:
        raise fault
    return found


def places(set_ups: Sequence[SetUp]) -> set[str]:
    """The tiers that are used by any of these."""
    return {getattr(each.config.offload, name) for each in set_ups for name in ("optimizer", "params")} - {"none"}


# ---- What a plan is asked for: a machine and a training job ----

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Everything that `make_plan` takes beside the model.

    Args:
        gpus: accelerators of a node, one rank each.
        nodes: hosts.
        tp_size: ranks over which each layer is split, as transformers does it.
        ep_size: ranks over which experts are split; 1, where they are split as other layers.
        sp_size: ranks that compute a sequence together, each a part of its tokens.
        gpu_memory: of an accelerator, in bytes or as `24GB`; on the CPU, what a rank may take.
        host_memory: of a node, for what is offloaded; None plans without it.
        disk: of a node, likewise.
        on_cpu: the ranks train on the host.
        seq: length of a row; None is the model's longest, up to 2048.
        batch: rows of a micro-batch on a rank; with `sp_size`, the rows that the ranks of a sequence compute together.
        accumulation: micro-batches of a step.
        dtype: of the parameters. A 16-bit one is trained through an fp32 master.
        mixed_precision: `no`, or accelerate's and Trainer's `bf16` and `fp16`.
        checkpointing: activations are recomputed in backward.
        chunked_loss: the loss is computed in chunks, without whole logits.
        offload_activations: what a forward saves is in host memory until backward (`offload.activations: cpu`).
        lora: rank of adapters on all linear layers; None trains everything.
        link_gbps: Gbit/s of each node's links to the other nodes, together.
        node_gbps: Gbit/s that each rank sends to the other ranks of its node; None is that of NVLink, or of gloo on a CPU.
        peak_tflops: what the accelerator's maker says for the dtype of the matrix products.
        utilisation: the part of it that kernels reach.
    """

    gpus: int = 1
    nodes: int = 1
    tp_size: int = 1
    ep_size: int = 1
    sp_size: int = 1
    gpu_memory: int | str = "24GB"
    host_memory: int | str | None = None
    disk: int | str | None = None
    on_cpu: bool = False
    seq: int | None = None
    batch: int = 1
    accumulation: int = 1
    dtype: str = "float32"
    mixed_precision: str = "no"
    checkpointing: bool = False
    chunked_loss: bool = False
    offload_activations: bool = False
    lora: int | None = None
    link_gbps: float = 1600.0
    node_gbps: float | None = None
    peak_tflops: float = 312.0
    utilisation: float = 0.45

    def __post_init__(self):
        for name in ("gpus", "nodes", "batch", "accumulation", "tp_size", "ep_size", "sp_size"):
            whole_number(name, getattr(self, name), 1)
        if self.gpus % self.tp_size:
            raise refuse("tp_size", self.tp_size, f"a number that divides the {self.gpus} ranks of a node")
        if self.ep_size > 1 and (self.ep_size % self.tp_size or self.world_size % self.ep_size):
            fitting = f"a multiple of tp_size ({self.tp_size}) that divides the {self.world_size} ranks"
            raise refuse("ep_size", self.ep_size, f"1, {fitting}")
        if self.sp_size > 1 and self.is_split:
            raise refuse("sp_size", self.sp_size, "1, beside tp_size or ep_size")
        if self.world_size % self.sp_size:
            raise refuse("sp_size", self.sp_size, f"a number that divides the {self.world_size} ranks")
        for name in ("seq", "lora"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 1)
        for name in ("gpu_memory", "host_memory", "disk"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _memory(name, getattr(self, name)))
        one_of("dtype", self.dtype, DTYPES)
        one_of("mixed_precision", self.mixed_precision, ("no", "bf16", "fp16"))
        for name in ("on_cpu", "checkpointing", "chunked_loss", "offload_activations"):
            one_of(name, getattr(self, name), (True, False))
        rates = ("link_gbps", "node_gbps", "peak_tflops")
        for name, most in (*((rate, math.inf) for rate in rates), ("utilisation", 1.0)):
            value = getattr(self, name)
            if name == "node_gbps" and value is None:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and 0 < value <= most and math.isfinite(value)):
                raise refuse(name, value, "a number above 0" + (f", up to {most:g}" if most < math.inf else ""))

    @property
    def world_size(self) -> int:
        return self.gpus * self.nodes

    @property
    def data_ranks(self) -> int:
        """Ranks with batches of their own, each `tp_size` counted once: over them hf_zero shards."""
        return self.world_size // self.tp_size

    @property
    def is_split(self) -> bool:
        """Whether a rank has a part of the model only."""
        return self.tp_size > 1 or self.ep_size > 1

    @property
    def machine(self) -> Machine:
        """Returns the rates of the ranks' machine."""
        link = self.link_gbps / 8 * 1e9 / self.gpus
        if self.on_cpu:
            machine = host_machine(nodes=self.nodes, ranks_a_node=self.gpus, link_bytes_a_second=link)
        else:
            machine = Machine(
                nodes=self.nodes,
                ranks_a_node=self.gpus,
                peak_flops=self.peak_tflops * 1e12,
                flops=self.peak_tflops * 1e12 * self.utilisation,
                link_bytes_a_second=link,
            )
        if self.node_gbps is None:
            return machine
        return replace(machine, node_bytes_a_second=self.node_gbps / 8 * 1e9)

    def bytes_of(self, name: str) -> int | None:
        """Returns the bytes of a memory for each rank."""
        value: Any = getattr(self, name)
        return None if value is None else value // (1 if name == "gpu_memory" else self.gpus)


def _memory(name: str, value: Any) -> int:
    """A size in bytes. A bare number such as 24 was meant as gigabytes, and 24 bytes are no memory."""
    nbytes = parse_bytes(name, value)
    if nbytes < 2**20:
        raise refuse(name, value, "1 MiB or more, with its unit: '24GB'")
    return nbytes


def host_machine(*, nodes: int, ranks_a_node: int, link_bytes_a_second: float = 1e9) -> Machine:
    """Ranks on the CPU, a core each, which talk by gloo: rates seen on a server of 2024, to compare set-ups by."""
    return Machine(
        nodes=nodes,
        ranks_a_node=ranks_a_node,
        flops=40e9,
        peak_flops=80e9,
        call_s=2e-4,
        step_s=5e-5,
        step_between_s=1e-4,
        node_bytes_a_second=1.5e9,
        link_bytes_a_second=link_bytes_a_second,
        memory_bytes_a_second=6e9,
        host_bytes_a_second=6e9,
        host_step_bytes_a_second=6e9,
        disk_bytes_a_second=1e9,
    )


# ---- Micro-batches for a model of transformers, as a data loader would give them, without values ----

_ONE_LABEL_A_ROW = ("SequenceClassification", "ImageClassification", "AudioClassification")
_A_LABEL_A_TOKEN = ("CausalLM", "LMHead", "MaskedLM", "TokenClassification", "ConditionalGeneration", "PreTraining")
_MASK = "attention_mask"


def longest(model: nn.Module) -> int | None:
    """Returns the longest input that the model's config allows; None if unknown."""
    config = getattr(model, "config", None)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "max_source_positions"):
        value = getattr(config, name, None)
        if isinstance(value, int) and 0 < value < 2**20:
            return value
    return None


def batch_of(model: nn.Module, rows: int, length: int) -> dict[str, Any]:
    """Keyword arguments of a training forward; made inside a trace.

    Raises:
        PlanError: the model reads something that is not known here.
    """
    inner = inner_model(model)
    main = getattr(inner, "main_input_name", "input_ids")
    config = getattr(inner, "config", None)
    inputs: dict[str, Any] = {}
    if main == "input_ids":
        inputs[main] = torch.zeros((rows, length), dtype=torch.long)
    elif main == "pixel_values":
        size, channels = getattr(config, "image_size", 224), getattr(config, "num_channels", 3)
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        inputs[main] = torch.zeros((rows, channels, height, width), dtype=_dtype_of(model))
    elif main == "input_features":
        bins, frames = getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1500)
        inputs[main] = torch.zeros((rows, bins, frames), dtype=_dtype_of(model))
    else:
        raise PlanError(
            f"hf_zero: {type(inner).__name__} reads {main!r}, of which no batch is known here. Give make_plan a model and its "
            "`batch`."
        )
    inputs |= _labels(inner, rows, length)
    if "use_cache" in inspect.signature(inner.forward).parameters:
        inputs["use_cache"] = False
    return inputs


def part_of(batch: Mapping[str, Any], sp_size: int) -> dict[str, Any]:
    """Returns a rank's part of a batch whose sequences `sp_size` ranks compute together: its first tokens."""

    def cut(value: Any) -> Any:
        return value[:, : -(-value.shape[1] // sp_size)] if torch.is_tensor(value) and value.ndim > 1 else value

    return {name: cut(value) for name, value in batch.items()}


def exchanged_bytes(model: nn.Module, tokens: int, sp_size: int, itemsize: int) -> int:
    """Counts what a rank sends in a forward to the other ranks of its sequences: queries, keys, values and results.

    Backward sends as much. Fewer heads of keys than ranks are sent to several.

    Args:
        tokens: of all rows, on this rank.
        itemsize: bytes of an element.
    """
    config: Any = getattr(inner_model(model), "config", None)
    if not all(hasattr(config, name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")):
        return 0
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    pairs = math.lcm(getattr(config, "num_key_value_heads", None) or heads, sp_size)
    elements = config.num_hidden_layers * tokens * width * 2 * (heads + pairs)
    return elements * itemsize * (sp_size - 1) // sp_size


def inner_model(model: nn.Module) -> nn.Module:
    """The model of transformers inside PEFT's wrapper."""
    get_base = getattr(model, "get_base_model", None)
    return get_base() if callable(get_base) else model


def _labels(model: nn.Module, rows: int, length: int) -> dict[str, Any]:
    name, parameters = type(model).__name__, inspect.signature(model.forward).parameters
    if "start_positions" in parameters:
        return {each: torch.zeros(rows, dtype=torch.long) for each in ("start_positions", "end_positions")}
    if "labels" not in parameters:
        return {}
    if any(part in name for part in _ONE_LABEL_A_ROW):
        return {"labels": torch.zeros(rows, dtype=torch.long)}
    if any(part in name for part in _A_LABEL_A_TOKEN):
        return {"labels": torch.zeros((rows, length), dtype=torch.long)}
    return {}


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


# ---- Models without memory, by Hub name, folder or config.json, and Trainer's optimizer for them ----

_META = torch.device("meta")


def model_without_memory(
    name: str | Path, *, dtype: torch.dtype, checkpointing: bool = False, lora_rank: int | None = None
) -> nn.Module:
    """The model of a config on the meta device, of the class that its `architectures` names.

    Args:
        name: a Hub name, a folder with a config.json, or such a file.
        dtype: of its parameters.
        checkpointing: activations are recomputed in backward.
        lora_rank: of adapters on all linear layers; None trains all parameters.

    Raises:
        PlanError: there is no such config, or it cannot be fetched; or peft is wanted and not there.
    """
    config = read_config(name)
    kind = _class_of(config)
    try:
        with _META:
            model = kind(config)
    except Exception as error:
        # Any class of transformers may refuse the values of a config in its own way.
        raise PlanError(f"hf_zero: the model of {name} cannot be made ({reason(error)}).") from error
    model = model.to(dtype)
    if getattr(config, "quantization_config", None) is not None:
        if lora_rank is None:
            raise PlanError(
                f"hf_zero: the weights of {name} are quantised, and only adapters on them train. Plan with --lora."
            )
        _quantise(model, name)
    if lora_rank is not None:
        model = _with_adapters(model, lora_rank)
    if checkpointing:
        checkpoint(model)
    return model.train()


def read_config(name: str | Path) -> PretrainedConfig:
    """The config of a folder, of a file, or of the Hub, where its cache has none and the net can be used.

    Raises:
        PlanError: see `model_without_memory`.
    """
    text, path = str(name), Path(name)
    here = path.exists()
    if not here and (path.suffix == ".json" or text.count("/") > 1 or not re.fullmatch(r"[\w.\-]+(/[\w.\-]+)?", text)):
        raise PlanError(f"hf_zero: {text} is no folder or config.json here, and no name of the Hub (OWNER/MODEL).")
    if path.is_dir() and not (path / "config.json").is_file():
        raise PlanError(f"hf_zero: {text} has no config.json.")
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
    tries = [True] if here or offline else [True, False]
    fault: Exception | None = None
    for only_here in tries:
        try:
            return AutoConfig.from_pretrained(text, local_files_only=only_here, trust_remote_code=False)
        except Exception as error:
            # What a config holds decides which error it is.
            fault = error
    if here:
        raise PlanError(f"hf_zero: the config of {text} cannot be read ({reason(fault)}).") from fault
    why = "HF_HUB_OFFLINE is set" if offline else reason(fault)
    raise PlanError(
        f"hf_zero: the config of {text} is not in the Hub's cache on this machine, and the Hub could not be asked ({why}). "
        "Give a folder or a config.json, or allow the network."
    ) from fault


def optimizer_like_trainers(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, fused, in two groups: decay for matrices, none for the rest."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [[p for p in trained if (p.dim() > 1) is matrix] for matrix in (True, False)]
    if not trained:
        raise PlanError("hf_zero: no parameter of the model requires a gradient, so there is nothing to train.")
    named = [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (0.01, 0.0)) if group]
    return torch.optim.AdamW(named, fused=True)


def _class_of(config: PretrainedConfig) -> Any:
    named = getattr(config, "architectures", None)
    name = named[0] if isinstance(named, list) and named else None
    if name is None:
        return AutoModel.from_config
    found = getattr(transformers, str(name), None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise PlanError(
            f"hf_zero: the config names the architecture {str(name)[:200]!r}, which is no model of transformers "
            f"{transformers.__version__}. Models with code of their own are planned from Python: make_plan(model, ...)."
        )
    return found


def _quantise(model: nn.Module, name: str | Path) -> None:
    """Gives the linear layers of a model on the meta device the packed weights and scales that its config names."""
    from transformers.quantizers import AutoHfQuantizer

    inner: Any = model
    try:
        quantizer = AutoHfQuantizer.from_config(inner.config.quantization_config, pre_quantized=True)
        quantizer.preprocess_model(inner, device_map=None)
    except Exception as error:
        # Each method asks for its own packages and settings.
        raise PlanError(f"hf_zero: the weights of {name} cannot be quantised in a plan ({reason(error)}).") from error
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        if hasattr(weight, "bnb_quantized"):
            module.weight = _in_four_bits(weight)
        elif hasattr(weight, "SCB"):
            weight.CB, weight.SCB = weight.data, torch.empty(weight.shape[0], device=_META)
        elif isinstance(weight, nn.Parameter) and is_packed(weight):
            kind = type(quantizer).__name__
            raise PlanError(
                f"hf_zero: the weights of {name} are packed by {kind}, whose layout the planner does not know. Load the model, "
                "and plan from Python: make_plan(model, ...)."
            )


def _in_four_bits(weight: Any) -> nn.Parameter:
    """Returns the packed form of a weight of bitsandbytes on the meta device, with scales of every block."""
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Params4bit

    blocks = ceil_div(weight.numel(), weight.blocksize)
    table = {"code": torch.empty(16, device=_META), "blocksize": weight.blocksize, "quant_type": weight.quant_type}
    scales = torch.empty(blocks, device=_META)
    if weight.compress_statistics:
        inner = QuantState(
            torch.empty(ceil_div(blocks, 256), device=_META),
            code=torch.empty(256, device=_META),
            blocksize=256,
            dtype=torch.float32,
        )
        table |= {"offset": torch.empty((), device=_META), "state2": inner}
        scales = scales.to(torch.uint8)
    state = QuantState(scales, shape=weight.shape, dtype=torch.float32, **table)
    codes = torch.empty(
        ceil_div(weight.numel(), 2 * weight.quant_storage.itemsize), 1, dtype=weight.quant_storage, device=_META
    )
    packed = Params4bit(codes, quant_state=state, quant_storage=weight.quant_storage, bnb_quantized=True)
    weight.module.quant_state = state
    return packed


def _with_adapters(model: nn.Module, rank: int) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise PlanError("hf_zero: --lora needs the package peft: pip install peft.") from error
    try:
        with _META:
            return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
    except Exception as error:
        # PEFT refuses models that it finds no layers in, each in its own way.
        raise PlanError(f"hf_zero: no adapters for {type(model).__name__} ({reason(error)}).") from error


def checkpoint(model: nn.Module) -> None:
    """Switches activation checkpointing on. Raises `PlanError`: the model does not support it."""
    enable = checkpointing_method(model)
    try:
        if enable is None:
            raise ValueError("it has no activation_checkpointing_enable")
        enable({"use_reentrant": False})
    except ValueError as error:
        name = type(inner_model(model)).__name__
        raise PlanError(f"hf_zero: {name} does not support activation checkpointing ({reason(error)}).") from error


def checkpointing_method(model: nn.Module) -> Callable[[dict[str, Any]], None] | None:
    """Returns the model's method that switches activation checkpointing on, or None if it has none.

    transformers 5.23 renamed the method. The old name still works there, but warns.
    """
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        if method := getattr(model, name, None):
            return method
    return None


def checkpointing_argument() -> str:
    """Returns the argument of `TrainingArguments` that the installed transformers documents for activation checkpointing."""
    return "gradient_checkpointing" if is_older(transformers.__version__, (5, 23)) else "activation_checkpointing"


def is_checkpointed(model: nn.Module) -> bool:
    """Whether activation checkpointing is switched on."""
    # The layers' attribute has the same name in all supported versions of transformers; the model's property was renamed.
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


# ---- A rank's part of a tensor-parallel model without memory, by transformers' own plan ----

_FIRST_OF_TWO = ("colwise", "colwise_gather_output", "colwise_rep")
_LAST = ("rowwise", "rowwise_split_input", "rowwise_rep")
_AS_THEY_ARE = (
    "sequence_parallel",
    "replicated_with_grad_allreduce",
    "mla_kv_a_proj",
    "all_reduce",
    "moe_tp_experts",
    "moe_identity_expert",
    "local_params",
    "replicate",
)
"""Styles that leave parameters whole on each rank."""

_BY_EXPERT = "grouped_gemm"
"""The style of parameters that are split by expert."""

_PACKED = 2
"""Projections side by side in one tensor, of which each is cut."""


def split_without_memory(model: nn.Module, tp_size: int, ep_size: int) -> frozenset[nn.Parameter]:
    """Gives each parameter of a model on the meta device the shape of the first rank's part, which no other's exceeds.

    Returns:
        Those that `ep_size` has split.

    Raises:
        PlanError: transformers has no plan for the model, or one with a style that is not known here; or `ep_size` does not
            divide its experts.
    """
    plan, expert_plan = _plan_of(model, "tp", tp_size), _plan_of(model, "ep", ep_size)
    # Of tied parameters one part is made.
    made: dict[nn.Parameter, nn.Parameter] = {}
    experts = set()
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            path = f"{module_name}.{name}"
            if parameter not in made and _style_of(path, expert_plan) == _BY_EXPERT:
                made[parameter] = _some_experts(parameter, path, ep_size)
                experts.add(made[parameter])
            elif parameter not in made:
                made[parameter] = _part(parameter, name, _style_of(path, plan), tp_size)
            module.register_parameter(name, made[parameter])
    return frozenset(experts)


def _plan_of(model: nn.Module, kind: str, size: int) -> dict[str, str]:
    if size == 1:
        return {}
    plan: dict[str, str] = dict(getattr(model, f"{kind}_plan", None) or {})
    if not plan:
        raise PlanError(
            f"hf_zero: transformers has no {kind}_plan for {type(model).__name__}, so {kind}_size {size} cannot be planned. Plan "
            f"it with {kind}_size 1."
        )
    return plan


def _some_experts(parameter: nn.Parameter, path: str, ep_size: int) -> nn.Parameter:
    count = parameter.shape[0]
    if count % ep_size:
        raise PlanError(
            f"hf_zero: ep_size is {ep_size}; allowed: a number that divides the {count} experts of {path!r}."
        )
    return _part(parameter, path, _BY_EXPERT, ep_size)


def _part(parameter: nn.Parameter, name: str, style: str | None, size: int) -> nn.Parameter:
    dim, repeats = _cut(parameter.dim(), name, style)
    if dim is None:
        return parameter
    shape = Box.whole(parameter.shape).split(dim, size, 0, repeats=repeats).local_shape
    return nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"), requires_grad=parameter.requires_grad)


def _cut(dims: int, name: str, style: str | None) -> tuple[int | None, int]:
    """Returns the dimension along which a style cuts a parameter, or None, and the tensors side by side in that dimension."""
    matrix = dims > 1
    cuts: dict[str | None, tuple[int | None, int]] = {
        None: (None, 1),
        "embedding_rowwise": (0, 1),
        "embedding_colwise": (1, 1),
        "grouped_gemm": (0, 1),
        "packed_colwise": (dims - 2 if matrix else 0, _PACKED if matrix else 1),
        "packed_rowwise": (dims - 1 if matrix else None, _PACKED),
        **dict.fromkeys(_FIRST_OF_TWO, (max(dims - 2, 0), 1)),
        **dict.fromkeys(_LAST, (None if name == "bias" else dims - 1, 1)),
        **dict.fromkeys(_AS_THEY_ARE, (None, 1)),
    }
    if style not in cuts:
        raise PlanError(
            f"hf_zero: the model's tp_plan has the style {style!r}, of which the planner does not know how it cuts; known are "
            f"{', '.join(sorted(str(each) for each in cuts if each))}."
        )
    return cuts[style]


def _style_of(name: str, plan: dict[str, str]) -> str | None:
    """Returns the style of a parameter, or else of its module; layers' numbers are asterisks in plans."""
    general = ".".join("*" if part.isdigit() else part for part in name.split("."))
    owner = general.rpartition(".")[0]
    return plan.get(general, plan.get(owner))
