"""Sequence parallelism (`sp_size`) in models of transformers: each rank of a sequence has a part of its tokens.

All ranks of a sequence receive the whole batch, like the ranks of a split model. The model's forward cuts the batch: a rank
embeds, normalizes and projects its own tokens. Attention exchanges tokens for heads, and so has the whole sequence for some of
the heads. The loss is the mean over the tokens of the whole batch, on each of these ranks.
"""

import inspect
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, ForMaskedLMLoss, ForTokenClassification
from transformers.masking_utils import (
    and_masks,
    find_packed_sequence_indices,
    packed_sequence_mask_function,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import ModelOutput

from ..config import ConfigError
from ..engine.engine import SEQUENCE_ATTRIBUTE, ZeroEngine
from ..engine.split_model import DifferentBatchesError, differing
from ..hooks.weak import EngineReference, WeakHook, engine_attached_to
from .exchange import SequenceRanks

_KERNELS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")
_LAYERS = {"full_attention", "sliding_attention"}
_LOSSES = (ForCausalLMLoss, ForMaskedLMLoss, ForTokenClassification)
_IGNORED = -100
"""Label of a token that is not trained on."""

# ---- Attention over a sequence on several ranks ----


@dataclass(frozen=True, kw_only=True, eq=False)
class WholeMask:
    """The mask of a whole sequence, in place of the mask of this rank's tokens. Layers also pass it on in recomputations.

    Attributes:
        values: mask for the kernel; None if the kernel needs none.
        ranks: the ranks of the sequence.
        position_ids: (rows, tokens), of the whole sequence.
    """

    values: torch.Tensor | None
    ranks: SequenceRanks
    position_ids: torch.Tensor


class _Shown:
    """An object with some attributes replaced. Through this, a kernel sees an attention module with only some of the heads."""

    def __init__(self, shown: Any, **instead: Any):
        self.__dict__.update(instead)
        self._shown = shown

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shown, name)


def _attend(
    kernel: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: WholeMask,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Computes the attention of this rank's heads over the whole sequence.

    Args:
        query, key, value: (rows, heads, this rank's tokens, width).

    Returns:
        (rows, this rank's tokens, heads, width), and None for the weights.
    """
    ranks = mask.ranks
    heads, pairs = query.shape[1], key.shape[1]
    for name in ("position_bias", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"hf_zero: {type(module).__name__} attends with {name}, a value for each head, but sp_size {ranks.size} "
                "distributes heads over ranks. Train this model with sp_size 1."
            )
    # With fewer key heads than ranks, several ranks get the same head, and backward adds their gradients.
    repeats = math.lcm(pairs, ranks.size) // pairs
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    query = ranks.exchange(query, 1, 2, "queries")
    key = ranks.exchange(key, 1, 2, "keys")
    value = ranks.exchange(value, 1, 2, "values")
    # Kernels for flash attention are chosen by a name in the config, and find packed sequences by their positions.
    config = _Shown(module.config, _attn_implementation=kernel)
    shown = _Shown(module, config=config, num_key_value_groups=heads // (pairs * repeats))
    if "position_ids" in kwargs:
        kwargs["position_ids"] = mask.position_ids
    attended, _ = _kernel(kernel, module)(shown, query, key, value, mask.values, **kwargs)
    return ranks.exchange(attended, 1, 2, "outputs of attention"), None


def _kernel_of(model: PreTrainedModel) -> str:
    """Returns the attention kernel of a model, also if its config was copied from a model with `SequenceParallel`."""
    name = model.config._attn_implementation
    return getattr(AttentionInterface().get(name), _KERNEL, name)


def _kernel(name: str, module: nn.Module) -> Callable[..., Any]:
    if name != "eager":
        return AttentionInterface()[name]
    # transformers defines this function in the file of each model, as the default of its registry.
    return vars(sys.modules[type(module).__module__])["eager_attention_forward"]


# ---- Hooks around the forward of a model ----


@dataclass(frozen=True, kw_only=True, eq=False)
class _Cut:
    """A forward whose batch is cut.

    Attributes:
        rows, tokens: shape of the batch.
        length: number of tokens, including the padding of the last rank's part.
        attention_mask: the given mask, with zeros for padding; None if none was given.
        position_ids: (rows, length).
        packed: the sequence that each token belongs to, (rows, length); None if each row is one sequence.
        weight: weight of this rank's loss in the sum over the ranks; None without labels.
    """

    rows: int
    tokens: int
    length: int
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor
    packed: torch.Tensor | None
    weight: torch.Tensor | None

    def arguments_of_mask(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of transformers' mask functions for the whole sequence, from the ones for this rank's tokens."""
        is_causal = "allow_is_bidirectional_skip" not in asked
        mask = self.attention_mask
        if mask is None and not is_causal and self.length > self.tokens:
            # In a causal sequence nothing attends to the padding at its end. Without causality, everything would.
            mask = torch.arange(self.length, device=self.position_ids.device).lt(self.tokens).expand(self.rows, -1)
        whole = {
            "q_length": self.length,
            "kv_length": self.length,
            "q_offset": 0,
            "kv_offset": 0,
            "attention_mask": mask,
        }
        if is_causal and self.packed is not None:
            # Older releases, for example 5.17, count a window by indices in the row instead of positions in the packed sequence.
            remap = getattr(masking_utils, "remap_positions_for_packed_sequence", lambda function, _: function)
            within = remap(asked["mask_function"], self.position_ids)
            whole["mask_function"] = and_masks(within, packed_sequence_mask_function(self.packed))
            whole["allow_is_causal_skip"] = False
        return asked | whole


_KERNEL = "_hf_zero_kernel"
"""Attribute of a function in transformers' registry: the kernel that computes a rank's heads."""

_CUT_ALONG = {"input_ids": 0, "inputs_embeds": 0, "token_type_ids": 0, "position_ids": 0}
"""Arguments that are cut, and their padding values."""

_FOR_OTHERS = {"seq_idx"}
"""Arguments with a value for each token, which TRL passes for convolutions. Supported models have no convolutions."""

_FORWARDS = 2
"""The first arguments, whose batches are compared between the ranks."""


class SequenceParallel:
    """Cuts the batches of a model over the ranks of a sequence while an engine trains the model.

    Args:
        engine: engine of a model that contains a model of transformers.
        size: number of ranks that a sequence is cut over. They are neighbors among the ranks that hold the same part of the
            model.

    Raises:
        ConfigError: the model or a setting does not support sequence parallelism; raised on all ranks.

    Attributes:
        wants_logits: gather whole logits in forwards without gradients. False if only losses are needed.
    """

    def __init__(self, engine: ZeroEngine, size: int):
        self._engine = weakref.ref(engine)
        self._root = weakref.ref(engine.model)
        model = _model_of(engine.model, size)
        _refuse_settings(engine, size)
        refuse_model(model, size, engine.state.split_sizes[0])
        self._size = size
        self._kernel = _kernel_of(model)
        self._is_causal = _loss_of(model) is ForCausalLMLoss
        self._uses_cache = bool(getattr(model.config.get_text_config(), "use_cache", False))
        # Other models compute the mean over a rank's own tokens, whatever the number of items.
        self._counts_items = "loss_function" in inspect.getsource(type(model).forward)
        self._signature = inspect.signature(model.forward)
        self._cut: _Cut | None = None
        self._has_mask = False
        self._compared = 0
        self.wants_logits = True
        self._sets = _sequences_of(engine, size)
        self._ranks = SequenceRanks.create(self._sets, engine.device, engine.config.comm, engine.transport.ledger)
        self._register(model)
        before, after = WeakHook(self, SequenceParallel._cut_batch), WeakHook(self, SequenceParallel._join_outputs)
        self._handles = [
            model.register_forward_pre_hook(before, with_kwargs=True),
            model.register_forward_hook(after, with_kwargs=True, always_call=True),
        ]
        # Store a reference: a copy of the model has no engine, and must not cut its batches.
        engine.model.__dict__[SEQUENCE_ATTRIBUTE] = EngineReference(self, keeps=True)

    def leave(self, model: PreTrainedModel) -> None:
        """Removes the hooks, and restores the model's own kernel."""
        for handle in self._handles:
            handle.remove()
        model.set_attn_implementation(self._kernel)

    def _register(self, model: PreTrainedModel) -> None:
        kernel, reference = self._kernel, weakref.ref(self)

        # No graph can hold these two functions: one sends to other ranks, and both read the state of this object.
        @torch.compiler.disable
        def attend(
            module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
        ) -> Any:
            if isinstance(mask, WholeMask):
                return _attend(kernel, module, query, key, value, mask, kwargs)
            parallel = reference()
            if parallel is not None and parallel._cut is not None:
                raise ValueError(
                    f"hf_zero: {type(module).__name__} attends without a mask of transformers.masking_utils, so each rank "
                    f"would attend only to its own tokens. Train this model with sp_size 1, not {parallel._size}."
                )
            return _kernel(kernel, module)(module, query, key, value, mask, **kwargs)

        @torch.compiler.disable
        def make_mask(**asked: Any) -> Any:
            make: Callable[..., Any] = AttentionMaskInterface()[kernel]
            parallel = reference()
            if parallel is None or parallel._cut is None:
                return make(**asked)
            parallel._has_mask = True
            values = make(**parallel._cut.arguments_of_mask(asked))
            return WholeMask(values=values, ranks=parallel._ranks, position_ids=parallel._cut.position_ids)

        # Each object has its own name, because two engines may train models in one process.
        name = f"hf_zero_sequence_{id(self)}"
        setattr(attend, _KERNEL, kernel)
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, make_mask)
        model.set_attn_implementation(name)
        for each in _models_in(model):
            if each.config._attn_implementation != name:
                model.set_attn_implementation(kernel)
                raise ConfigError(
                    f"hf_zero: {type(each).__name__} does not attend through transformers' attention interface, which sp_size "
                    f"{self._size} needs to distribute heads over ranks. Train this model with sp_size 1, or with tp_size."
                )

    # ---- Before a forward ----

    def _cut_batch(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        self._cut = None
        root, engine = self._root(), self._engine()
        if root is None or engine is None or engine_attached_to(root) is not engine:
            return None
        said = dict(self._signature.bind_partial(*args, **kwargs).arguments)
        asked = {name: value for name, value in (said | said.pop("kwargs", {})).items() if value is not None}
        if self._generates(asked):
            return None
        self._compare(engine, asked)
        held = asked.get("input_ids", asked.get("inputs_embeds"))
        if held is None:
            raise ValueError("hf_zero: with sp_size, a model needs input_ids or inputs_embeds, and got neither.")
        rows, tokens = held.shape[:2]
        length = -(-tokens // self._size) * self._size
        targets = self._targets(asked)
        mask = _fill(_two_dimensional("attention_mask", asked.pop("attention_mask", None)), length, 0)
        positions, packed = _two_dimensional("position_ids", asked.get("position_ids")), None
        if positions is None:
            positions = torch.arange(tokens, device=held.device).unsqueeze(0)
        elif mask is None and not asked.get("use_cache", self._uses_cache):
            # As on one rank: transformers takes positions for packed sequences only if there is neither a mask nor a cache.
            packed = find_packed_sequence_indices(_fill(positions.expand(rows, -1), length, 0))
        asked["position_ids"] = positions = _fill(positions.expand(rows, -1), length, 0)
        for name, value in asked.items():
            if name in _CUT_ALONG:
                asked[name] = self._part(_fill(value, length, _CUT_ALONG[name]))
            elif name not in _FOR_OTHERS and torch.is_tensor(value) and value.shape[:2] == held.shape[:2]:
                raise ValueError(
                    f"hf_zero: sp_size {self._size} does not know how to cut the argument {name!r} of shape "
                    f"{tuple(value.shape)}. Allowed: {', '.join(_CUT_ALONG)}, attention_mask, labels and shift_labels."
                )
        self._has_mask = False
        weight = None
        if targets is not None:
            weight = self._label(asked, _fill(targets, length, _IGNORED))
        # A full mask of ones, because with a mask of this rank's tokens transformers would look for packed sequences in them.
        asked["attention_mask"] = held.new_ones((rows, length), dtype=torch.bool)
        if "use_cache" in self._signature.parameters:
            asked["use_cache"] = False
        self._cut = _Cut(
            rows=rows,
            tokens=tokens,
            length=length,
            attention_mask=None if mask is None else mask.bool(),
            position_ids=positions,
            packed=packed,
            weight=weight,
        )
        return (), asked

    def _generates(self, asked: dict[str, Any]) -> bool:
        """Whether a forward belongs to generation, which each rank computes for the full sequence."""
        names = [
            name for name in ("cache", "past_key_values", "use_cache", "logits_to_keep") if _is_set(asked.get(name))
        ]
        names += [name for name in ("output_attentions", "output_router_logits") if asked.get(name)]
        if names and torch.is_grad_enabled():
            raise ValueError(
                f"hf_zero: a training forward has {', '.join(names)}, which a rank with only a part of the sequence cannot "
                f"provide. Omit it, or train with sp_size 1, not {self._size}."
            )
        return bool(names)

    def _compare(self, engine: ZeroEngine, asked: dict[str, Any]) -> None:
        """Raises `DifferentBatchesError` on all ranks if the ranks of a sequence have different batches. Collective."""
        if self._compared == _FORWARDS or not torch.is_grad_enabled():
            return
        self._compared += 1
        for (first, *_), other in differing([asked], engine.world, self._sets):
            raise DifferentBatchesError(
                f"hf_zero: ranks {first} and {other} share a sequence (sp_size {self._size}) but got different batches. "
                "Prepare the dataloader with accelerate, or pass each sequence's ranks the same batch."
            )

    def _targets(self, asked: dict[str, Any]) -> torch.Tensor | None:
        """Removes labels from a forward's arguments; returns the target of each token of the whole batch."""
        labels, shifted = asked.pop("labels", None), asked.pop("shift_labels", None)
        if shifted is not None:
            return shifted
        if labels is None or not self._is_causal:
            return labels
        # Shift before the cut, because the last token of a rank predicts the first token of the next rank.
        return F.pad(labels, (0, 1), value=_IGNORED)[:, 1:]

    def _label(self, asked: dict[str, Any], targets: torch.Tensor) -> torch.Tensor:
        """Adds the labels of this rank's tokens to a forward's arguments; returns the weight of its loss in the batch's loss."""
        asked["labels"] = own = self._part(targets).contiguous()
        if self._is_causal:
            asked["shift_labels"] = own
        in_all = targets.ne(_IGNORED).sum()
        if not self._counts_items:
            return own.ne(_IGNORED).sum() / in_all
        # Then each rank's loss is its share of the mean, even if none of its tokens has a label.
        asked.setdefault("num_items_in_batch", in_all)
        return torch.ones((), device=targets.device)

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(self._size, dim=1)[self._ranks.index]

    # ---- After a forward ----

    def _join_outputs(self, model: nn.Module, _args: tuple, _kwargs: dict[str, Any], outputs: Any) -> Any:
        cut, self._cut = self._cut, None
        if cut is None or outputs is None:
            return None
        if not self._has_mask:
            raise ValueError(
                f"hf_zero: {type(model).__name__} did not ask transformers for a mask of this sequence; another model may have "
                "the same config object. Build each model with its own config, or train with sp_size 1."
            )
        if not isinstance(outputs, ModelOutput):
            raise ValueError(
                "hf_zero: with sp_size, a model returns its outputs by name, but this one returned a "
                f"{type(outputs).__name__}. Remove return_dict=False."
            )
        loss = outputs.get("loss")
        if loss is not None and cut.weight is not None:
            # A rank without labels may have computed the mean of nothing, which is NaN.
            share = torch.where(cut.weight > 0, loss * cut.weight, torch.zeros_like(loss))
            outputs["loss"] = self._ranks.sum(share)
        # Logits are the largest output. If the model has computed the loss, no rank needs the logits of all tokens.
        left = {"loss"}
        if loss is not None and (torch.is_grad_enabled() or not self.wants_logits):
            left.add("logits")
        # Iterate in the order of the outputs, because the order of a set could differ between ranks.
        for name in [name for name in outputs if name not in left]:
            outputs[name] = self._joined(cut, name, outputs[name])
        return outputs

    def _joined(self, cut: _Cut, name: str, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(self._joined(cut, name, each) for each in value)
        if isinstance(value, torch.Tensor) and value.shape[:2] == (cut.rows, cut.length // self._size):
            return self._ranks.gather(value, 1, name)[:, : cut.tokens]
        return value


def enable_sequence_parallel(engine: ZeroEngine, size: int) -> None:
    """Cuts the batches of an engine's model over the ranks of sequences from now on. Collective.

    Raises:
        ConfigError: the model or a setting does not support sequence parallelism; raised on all ranks.
    """
    former = sequence_parallel_of(engine.model)
    if former is not None:
        former.leave(_model_of(engine.model, size))
    SequenceParallel(engine, size)


def sequence_parallel_of(model: nn.Module) -> SequenceParallel | None:
    """Returns the `SequenceParallel` of a model under an engine; None without one."""
    reference = model.__dict__.get(SEQUENCE_ATTRIBUTE)
    return reference() if isinstance(reference, EngineReference) else None


def _sequences_of(engine: ZeroEngine, size: int) -> list[tuple[int, ...]]:
    """Lists the ranks of each sequence. Collective. The ranks of a sequence hold the same part of a split model."""
    everyone = engine.world.exchange(tuple(engine.groups.world.ranks), "ranks of a sequence")
    return [ranks[at : at + size] for ranks in dict.fromkeys(everyone) for at in range(0, len(ranks), size)]


def _is_set(value: Any) -> bool:
    return value is not None and value is not False and not (isinstance(value, int) and value == 0)


def _fill(values: torch.Tensor | None, length: int, value: float) -> Any:
    """Pads dimension 1 up to `length`."""
    if values is None or values.shape[1] == length:
        return values
    return F.pad(values, (0, 0) * (values.ndim - 2) + (0, length - values.shape[1]), value=value)


def _two_dimensional(name: str, values: torch.Tensor | None) -> torch.Tensor | None:
    if values is not None and values.ndim != 2:
        raise ValueError(
            f"hf_zero: {name} has {values.ndim} dimensions, and sp_size needs the shape (rows, tokens). Pass it in this shape, "
            "or omit it."
        )
    return values


# ---- Models and settings without support for sequence parallelism ----


def _model_of(root: nn.Module, size: int) -> PreTrainedModel:
    """Returns the outermost model of transformers in a module."""
    found = next(_models_in(root), None)
    if found is None:
        raise ConfigError(
            f"hf_zero: {type(root).__name__} holds no model of transformers, and sp_size {size} cuts only the batches of such "
            "models. Train it with sp_size 1."
        )
    return found


def _models_in(root: nn.Module) -> Iterator[PreTrainedModel]:
    return (module for module in root.modules() if isinstance(module, PreTrainedModel))


def refuse_model(model: PreTrainedModel, size: int, tp_size: int = 1) -> None:
    """Raises `ConfigError` for a model whose results would differ if computed from parts of a sequence.

    Args:
        tp_size: number of ranks that the model's heads are already split over.
    """
    why = _why_not(model, size * tp_size)
    if why is not None:
        raise ConfigError(
            f"hf_zero: sp_size is {size}, and {type(model).__name__} {why}. Train this model with sp_size 1."
        )


def _loss_of(model: PreTrainedModel) -> Callable[..., torch.Tensor] | None:
    if type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        # Some class names, such as GPT2LMHeadModel, are not in transformers' table.
        return ForCausalLMLoss
    return LOSS_MAPPING.get(model.loss_type)


def _why_not(model: PreTrainedModel, ranks_of_heads: int) -> str | None:
    config = model.config.get_text_config()
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        return "has an encoder and a decoder, with two different sequences"
    if config is not model.config:
        return "takes other inputs than text, which are not cut with the tokens"
    others = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    if others:
        return f"has layers of {', '.join(sorted(others))}, which need the tokens of other ranks"
    if _loss_of(model) not in _LOSSES:
        return "has no loss for each token (as causal, masked and token classification models have)"
    heads = getattr(config, "num_attention_heads", 0)
    if not heads or heads % ranks_of_heads:
        return f"has {heads} attention heads, which {ranks_of_heads} ranks cannot share evenly"
    if _kernel_of(model) not in _KERNELS:
        return f"attends with {_kernel_of(model)}; allowed: {', '.join(_KERNELS)}"
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" not in parameters or "kwargs" not in parameters:
        return "takes no position_ids or no further arguments, so each part would start at position 0"
    if _counts_padding(model):
        return "counts positions from the padding of a row, which a part of the sequence does not contain"
    if getattr(config, "output_router_logits", False):
        return "has a loss over its routers (output_router_logits), which is not the sum of the parts' losses"
    return None


def _counts_padding(model: PreTrainedModel) -> bool:
    """Whether a model derives positions from its input or mask, according to its source; other models start at 0 in each row."""
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        return True
    return "cumsum(attention_mask" in inspect.getsource(sys.modules[type(model).__module__])


def _refuse_settings(engine: ZeroEngine, size: int) -> None:
    (together, copy), config = engine.state.split_sizes, engine.config
    if together != copy:
        raise ConfigError(
            f"hf_zero: sp_size is {size} and ep_size {copy} is above tp_size {together}: experts get tokens of several "
            "sequences. Load the model with ep_size equal to tp_size, or leave sp_size at 1."
        )
    ranks = engine.groups.world_size
    if ranks % size:
        added = f" (after tp_size {together})" if together > 1 else ""
        raise ConfigError(f"hf_zero: sp_size is {size}, which does not divide the {ranks} ranks{added} of this run.")
    if engine.module is not engine.model:
        raise ConfigError(
            f"hf_zero: sp_size is {size}, and the optimizer also has parameters of no model, or of a second one; their batches "
            "are not cut. Create a separate optimizer for these, or leave sp_size at 1."
        )
    if config.comm.sync_every > 1:
        raise ConfigError(
            f"hf_zero config: `comm.sync_every` is {config.comm.sync_every}, and sp_size {size} adds up a sequence's gradients "
            "in each step. Leave `comm.sync_every` at 1."
        )
    if config.out_of_memory == "halve":
        raise ConfigError(
            f"hf_zero config: `out_of_memory: halve` cannot be combined with sp_size {size}: the other ranks of a sequence "
            "would wait for the failed one. Leave `out_of_memory` at stop."
        )
