"""Breaks the engine on purpose, one place at a time, and shows that the short suite's tests fail of it.

    python scripts/mutation_check.py                  # all breaks: some eight minutes on two cores
    python scripts/mutation_check.py wrong-divisor    # those named

Each break is made in a copy of the tree, and the tests named beside it are run there until the first that fails. A break that
no test fails of is printed as NOT CAUGHT, and the exit status is 1. However tests are merged or cut, they have to catch them all.
"""

from __future__ import annotations

import argparse
import ast
import shutil
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path

from warm_pytest import WarmPytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "hf_zero"
COPIED = (PACKAGE, "tests", "scripts", "configs", "pyproject.toml", "README.md", "LICENSE")
SECONDS_A_BREAK = 240

# pytest's exit statuses.
PASSED, FAILED = 0, 1


@dataclass(frozen=True, kw_only=True)
class Break:
    """One fault.

    Attributes:
        place: qualified name of the function, or method, that it is made in; the file is found by it.
        old, new: the text of that function that is replaced, and what by.
        tests: names of files in any folder of tests/, of which those are run that `only` selects.
        only: pytest's `-k`.
    """

    name: str
    place: str
    old: str
    new: str
    tests: tuple[str, ...]
    only: str = ""


UNORDERED = (
    # What orders streams, communicators and threads: name, place, the cells of test_races.py that see it, old, new.
    (
        "side-stream-begun-before-the-queue",
        "_StreamQueue.aside",
        "halves",
        "self._stream.wait_stream(self._module.current_stream(self._device))",
        "pass",
    ),
    (
        "save-begun-before-the-queue",
        "_StreamQueue.aside",
        "saved",
        "cast(_Event, behind).hold_up(self._stream)",
        "pass",
    ),
    ("stream-not-held-up-by-an-event", "_Event.hold_up", "halves", "stream.wait_event(self._event)", "pass"),
    ("event-not-waited-for", "_Event.wait", "host and accumulated", "self._event.synchronize()", "pass"),
    ("number-read-before-it-is-there", "HostValue.value", "skipped", "self._there.wait()", "pass"),
    (
        "pinned-memory-given-out-again-in-use",
        "PinnedPool.take",
        "host and accumulated",
        "weakref.finalize(views, free.append, memory).atexit = False",
        "free.append(memory)",
    ),
    (
        "gradient-given-out-again-under-its-copy",
        "_StreamDownlink.start_copy",
        "host and accumulated",
        "source.record_stream(self._module.current_stream(self._device))",
        "pass",
    ),
    ("gradient-added-before-it-has-landed", "_add_landed", "host and accumulated", "landed.wait()", "pass"),
    ("gradient-widened-before-it-has-landed", "_Widened.wait", "bf16 and host", "self._landed.wait()", "pass"),
    ("buffer-filled-again-under-its-copy", "RoundedUplink._send", "bf16 and host", "sent.wait()", "pass"),
    (
        "layer-used-before-its-shard-is-there",
        "OffloadedMemory.arrive",
        "nvme and none",
        "self._copied.hold_up_device()",
        "pass",
    ),
    ("shard-stepped-under-its-copy", "OffloadedMemory.forget_fetch", "evaluated", "self._copied.wait()", "pass"),
    (
        "activation-given-out-again-under-its-copy",
        "ActivationsInHostMemory._let_go",
        "halves",
        "mark.hold_up_device()",
        "pass",
    ),
    (
        "activation-let-go-under-its-copy",
        "ActivationsInHostMemory._move",
        "halves",
        "(self._queue.mark(), storage)",
        "(self._queue.mark(), None)",
    ),
    ("activation-used-before-it-is-back", "_Moved.storage", "halves", "mark.hold_up_device()", "pass"),
    (
        "activation-given-up-under-its-copy",
        "_Moved.forget_fetch",
        "halves",
        "self._fetched[1].hold_up_device()",
        "pass",
    ),
    ("save-written-before-its-copy-is-there", "_StagedCopy.values", "saved", "self._copied.wait()", "pass"),
    ("save-dropped-under-its-copy", "_StagedCopy.release", "saved", "self.values()", "pass"),
    (
        "state-stepped-under-a-save",
        "LivePieces.secure",
        "saved",
        "if self._is_secured:\n            return\n        self._is_wanted",
        "return\n        self._is_wanted",
    ),
    ("early-step-before-its-gradient", "StepsBeside._step_in_memory", "early and not files", "arrival.wait()", "pass"),
    (
        "early-step-in-a-file-before-its-gradient",
        "StepsBeside._step_by_file",
        "early and files",
        "arrival.wait()",
        "pass",
    ),
    ("gradient-read-before-it-has-arrived", "Bucket.await_gradient", "host and accumulated", "arrival.wait()", "pass"),
    ("gradient-set-while-another-is-added", "add_or_set", "dropped", "bucket.await_gradient()", "pass"),
    ("shard-kept-for-backward-before-it-is-there", "ForwardGather.start", "secondary", "handle.finish()", "pass"),
    (
        "exact-weights-shown-under-their-gather",
        "ExactWeights.at_hand",
        "edited",
        ".start(bucket).finish()",
        ".start(bucket)",
    ),
    (
        "look-at-a-gradient-not-waited-for",
        "_gather",
        "edited",
        "subject=slot.name)).finish()",
        "subject=slot.name))",
    ),
    (
        "reduced-shard-left-in-a-buffer-of-others",
        "ShardedGradients._target",
        "host and accumulated",
        "return self._scratch(bucket)\n        if",
        "return flat[own.start : own.stop]\n        if",
    ),
    ("reduction-on-a-device-not-waited-for", "GradientStore.finish", "stage and 2", "handle.finish()", "pass"),
    (
        "layer-on-a-device-not-waited-for",
        "Unit.finish_unshard",
        "saved",
        "self._handles.pop(0).finish()",
        "self._handles.pop(0)",
    ),
    ("parameters-read-under-their-gather", "ParameterGather.finish", "idle", "handle.finish()", "pass"),
    (
        "shard-stepped-under-its-gather",
        "TrainingStep._end_reads",
        "idle",
        "self._parts.parameter_gather.finish_all()",
        "pass",
    ),
    (
        "parameters-sent-before-their-copy",
        "ParameterGather.start",
        "host and accumulated",
        "with bucket.tier.uplink.aside() if bucket.tier.is_apart else nullcontext():",
        "if True:",
    ),
    (
        "parameters-read-before-their-copy",
        "TrainingStep._hand_over",
        "bf16 and host and idle",
        "parts.tier.uplink.hold_up_device()",
        "pass",
    ),
    (
        "master-stepped-under-its-copy",
        "TrainingStep._end_reads",
        "host and idle",
        "self._parts.tier.uplink.wait()",
        "pass",
    ),
    (
        "layers-left-whole-through-a-step",
        "TrainingStep._end_reads",
        "evaluated",
        "self._parts.sharded.schedule.reshard_all()",
        "pass",
    ),
    ("next-step-of-a-sum-before-its-last", "_Steps.advance", "between", "self._running.finish()", "pass"),
    ("sum-of-several-steps-not-waited-for", "_Steps.finish", "between", "self._running.finish()", "pass"),
    (
        "sum-between-groups-before-the-sum-inside",
        "_Steps.advance",
        "groups and not between",
        "self._running.finish(is_exposed=False)",
        "pass",
    ),
    (
        "first-steps-memory-let-go-under-it",
        "_Steps.__init__",
        "int8 and between",
        "self._first: Start | None = first",
        "self._first: Start | None = None",
    ),
    (
        "codes-summed-before-they-have-come",
        "reduce_scatter_blocks",
        "int8 and not between",
        "handle.finish()",
        "pass",
    ),
    ("codes-read-before-they-have-come", "all_gather_blocks", "int8 and not between", "handle.finish()", "pass"),
    (
        "sampled-error-before-the-exact-sum",
        "QuantisedReduction.start",
        "int8 and not between",
        "sample.finish()",
        "pass",
    ),
    (
        "sampled-error-before-the-sum",
        "QuantisedReduction.start",
        "int8 and not between",
        "            handle.finish()",
        "            pass",
    ),
    ("models-averaged-before-they-are-summed", "Anchor.step", "outer", "models.finish()", "pass"),
    ("models-taken-over-before-they-are-there", "Anchor.step", "outer", "anchors.finish()", "pass"),
    ("norm-read-before-it-is-summed", "CollectiveTransport.agree_sum", "clipped", ".finish()", ""),
    ("reduce-scatter-not-waited-for", "CollectiveTransport.start_reduce_scatter", "stage and 2", "work.wait()", "pass"),
    ("all-gather-not-waited-for", "CollectiveTransport.start_all_gather", "saved", "work.wait()", "None"),
    (
        "all-to-all-not-waited-for",
        "CollectiveTransport.start_all_to_all",
        "int8 and not between",
        "work.wait()",
        "None",
    ),
    ("all-reduce-not-waited-for", "CollectiveTransport.start_all_reduce", "reduced", "work.wait()", "None"),
)

BREAKS = (
    Break(
        name="wrong-divisor",
        place="Bucket.__init__",
        old="1.0 / group.groups.world_size",
        new="1.0 / (group.groups.world_size + 1)",
        tests=("test_equivalence.py",),
        only="plain-gpt2",
    ),
    Break(
        name="parameter-of-an-undefined-gradient-not-stepped",
        place="Gradients._take_undefined",
        old="slot.used = True",
        new="slot.used = False",
        tests=("test_equivalence.py",),
        only="undefined_gradients",
    ),
    Break(
        name="buffers-sent-behind-steps-alone",
        place="ModelBuffers.before_forward",
        old="if self.is_due:",
        new="if self._is_due_behind_step:",
        tests=("test_several_forwards.py",),
        only="script_writes",
    ),
    Break(
        name="ignored-parameters-start-as-rank-0s",
        place="BucketBuilder.build",
        old="ignored, names = ignored_parameters(model), ignored_by_ddp(model)",
        new="ignored, names = frozenset(), frozenset()",
        tests=("test_uncommon_loops.py",),
        only="ddp_is_told",
    ),
    Break(
        name="what-a-model-keeps-in-float32-is-cast",
        place="GatheredDtypes.stays",
        old="parameter in self._kept",
        new="False",
        tests=("test_dtypes.py",),
        only="keeps_in_float32",
    ),
    Break(
        name="what-an-optimizer-keeps-by-parameter-is-not-found",
        place="_stand_in",
        old="for key in list(held):",
        new="for key in ():",
        tests=("test_whole_parameters.py",),
        only="asking",
    ),
    Break(
        name="parts-of-parameters-for-state-in-blocks",
        place="_looks_at_size",
        old="return not _same(pieces, cut(whole))",
        new="return False",
        tests=("test_whole_parameters.py",),
        only="asking or how_far",
    ),
    Break(
        name="reduction-never-waited-for",
        place="GradientStore.finish",
        old="            handle.finish()\n",
        new="",
        tests=("test_equivalence.py",),
        only="plain-gpt2",
    ),
    Break(
        name="whole-gradients-kept-without-accumulation",
        place="choose_store",
        old='"lasting" if is_whole else kept',
        new='"lasting"',
        tests=("test_memory.py",),
        only="one_rank_among_64",
    ),
    Break(
        name="gathered-layer-never-waited-for",
        place="Unit.finish_unshard",
        old="self._handles.pop(0).finish()",
        new="self._handles.pop(0)",
        tests=("test_equivalence.py",),
        only="plain-gpt2",
    ),
    Break(
        name="edits-of-a-forward-dropped",
        place="Unit.reshard",
        old="            self._take_in_edits()\n",
        new="            pass\n",
        tests=("test_edits_in_place.py",),
        only="a_forward_edits",
    ),
    Break(
        name="edits-that-a-master-undoes-not-looked-for",
        place="UncountedEdits._waits",
        old="return row.tensor.grad is not None and",
        new="return row.tensor.grad is None and",
        tests=("test_edits_in_place.py",),
        only="a_master_would_undo",
    ),
    Break(
        name="edits-seen-by-the-device-never-read",
        place="Unsharding.reshard_all",
        old="        self._refuse_unseen_edits()\n",
        new="",
        tests=("test_host_waits.py",),
        only="nothing_counts",
    ),
    Break(
        name="waits-timed-before-somebody-asks",
        place="choose_transport",
        old='is_timed=device.type == "cpu"',
        new="is_timed=True",
        tests=("test_host_waits.py",),
        only="somebody_asks",
    ),
    Break(
        name="speed-of-bytes-that-nobody-timed",
        place="Ledger.count",
        old="if self.is_timed and (kind in self._since or not self._under_way.get(kind)):",
        new="if self.is_timed:",
        tests=("test_ledger.py",),
    ),
    Break(
        name="early-read-not-waited-for",
        place="_wait_for",
        old="engine.finish_parameters(parameter)",
        new="pass",
        tests=("test_several_forwards.py",),
        only="wait_for_the_step",
    ),
    Break(
        name="bucket-not-gathered-after-the-step",
        place="ParameterGather.start",
        old="for bucket in buckets:",
        new="for bucket in list(buckets)[1:]:",
        tests=("test_equivalence.py",),
        only="plain-gpt2",
    ),
    Break(
        name="bucket-sent-before-its-step",
        place="TrainingStep._bucket_stepped",
        old="while self._to_send and self._to_send[0] in self._written:",
        new="while self._to_send:",
        tests=("test_offload.py",),
        only="a_bucket_is_sent",
    ),
    Break(
        name="bucket-sent-before-it-is-written-back",
        place="TrainingStep._bucket_stepped",
        old="self._parts.holder.write_back([bucket])",
        new="pass",
        tests=("test_offload.py",),
        only="a_bucket_is_sent",
    ),
    Break(
        name="bucket-sent-before-others-have-written-to-it",
        place="ShardedOptimizer.keeps_stepped_rows",
        old="return is_next and is_of_torch(self.optimizer)",
        new="return True",
        tests=("test_offload.py",),
        only="may_be_written",
    ),
    Break(
        name="masters-in-the-queue-that-computes",
        place="RoundedUplink.aside",
        old="return self._queue.aside()",
        new="return nullcontext()",
        tests=("test_races.py",),
        only="goes_up_beside",
    ),
    Break(
        name="skipped-row",
        place="rows_of_shard",
        old="return tuple(rows)",
        new="return tuple(rows[:-1] or rows)",
        tests=("test_layout.py",),
    ),
    Break(
        name="skipped-row-in-training",
        place="rows_of_shard",
        old="return tuple(rows)",
        new="return tuple(rows[:-1] or rows)",
        tests=("test_equivalence.py",),
        only="plain-gpt2",
    ),
    Break(
        name="padding-left-dirty",
        place="clear_padding",
        old="for gap in layout.padding:",
        new="for gap in ():",
        tests=("test_undefined_memory.py",),
    ),
    Break(
        name="another-ranks-shard",
        place="BucketLayout.shard",
        old="Interval(rank * self.shard_numel, (rank + 1) * self.shard_numel)",
        new="Interval((self.shards - 1 - rank) * self.shard_numel, (self.shards - rank) * self.shard_numel)",
        tests=("test_equivalence.py",),
        only="plain-gpt2",
    ),
    Break(
        name="another-ranks-secondary-shard",
        place="ForwardGather.start",
        old="[self.node.place]",
        new="[0]",
        tests=("test_hybrid.py",),
        only="secondary_shards",
    ),
    Break(
        name="groups-never-summed-over-replicas",
        place="HybridReduction.start",
        old="transport.start_all_reduce(out, label)",
        new="transport.start_all_reduce(out.clone(), label)",
        tests=("test_hybrid.py",),
        only="several_shard_groups_have",
    ),
    Break(
        name="gradients-not-unscaled",
        place="_OverShards._unscale_grads_",
        old="super()._unscale_grads_(optimizer, scale, clean, allow_fp16)",
        new="super()._unscale_grads_(optimizer, torch.ones_like(scale), clean, allow_fp16)",
        tests=("test_loss_scale.py",),
        only="autocast_in_fp16",
    ),
    Break(
        name="overflow-not-agreed-upon",
        place="_OverShards._unscale_grads_",
        old="engine.nonfinite.agree(optimizer, mine)",
        new="mine",
        tests=("test_loss_scale.py",),
        only="autocast_in_fp16",
    ),
    Break(
        name="clip-by-this-ranks-norm",
        place="GradientNorm._norm",
        old="self.among.agree_sum(mine.reshape(1), NORM_LABEL)[0]",
        new="mine",
        tests=("test_equivalence.py",),
        only="biting_clip and gpt2",
    ),
    Break(
        name="clip-forgotten",
        place="StepChoice.scale_gradients",
        old="if coefficient is None:",
        new="if True:",
        tests=("test_equivalence.py",),
        only="biting_clip and gpt2",
    ),
    Break(
        name="master-not-written-back",
        place="Bucket.write_back",
        old="self.memory.write_own(self.master, self.tier.uplink)",
        new="pass",
        tests=("test_equivalence.py",),
        only="bf16_parameters",
    ),
    Break(
        name="master-of-the-parameters-dtype",
        place="resolve_precision",
        old="torch.float32 if kept.itemsize < 4 else kept",
        new="kept",
        tests=("test_equivalence.py",),
        only="bf16_parameters",
    ),
    Break(
        name="second-micro-batch-overwrites-the-first",
        place="_sum_into",
        old="values.add_(",
        new="values.copy_(",
        tests=("test_equivalence.py",),
        only="sharded_accumulation",
    ),
    Break(
        name="unused-parameter-not-agreed-upon",
        place="Gradients._agree",
        old="if is_used and not slot.used:",
        new="if False:",
        tests=("test_equivalence.py",),
        only="unused_twice_used",
    ),
    Break(
        name="buffers-not-sent",
        place="ModelBuffers.after_forward",
        old="self.is_due = not under_no_sync",
        new="self.is_due = False",
        tests=("test_equivalence.py",),
        only="unused_twice_used",
    ),
    Break(
        name="layers-not-freed",
        place="GatheredMemory.drop",
        old="        self._reservation.release()\n",
        new="",
        tests=("test_memory.py",),
        only="state_bytes_a_rank",
    ),
    Break(
        name="checkpoint-without-a-moment",
        place="state_rows",
        old="for kind, tensor in tensors.items():",
        new="for kind, tensor in list(tensors.items())[:-1]:",
        tests=("test_checkpoint.py",),
        only="another_world_size",
    ),
    Break(
        name="saved-row-read-from-a-wrong-place",
        place="pieces_for",
        old="in_source=common.shift(-interval.start)",
        new="in_source=Interval(0, common.numel)",
        tests=("test_checkpoint.py",),
        only="another_world_size",
    ),
    Break(
        name="hash-not-compared",
        place="_faults_of_file",
        old="found != record.xxh3[index]",
        new="False",
        tests=("test_commit.py",),
        only="flipped_bit",
    ),
    Break(
        name="residual-dropped",
        place="quantise_reference",
        old="residual[part].copy_(error)",
        new="pass",
        tests=("test_quantised_wire.py",),
        only="by_error_feedback",
    ),
    Break(
        name="residual-of-one-rank-alone-resumed",
        place="Residuals.fill",
        old="place.add_(",
        new="place.copy_(",
        tests=("test_quantised_wire.py",),
        only="residuals_of_several_ranks",
    ),
    Break(
        name="early-step-never-taken-over",
        place="StepsBeside.take_over",
        old="self.doubles[bucket].take_over(states)",
        new="pass",
        tests=("test_early_steps.py",),
        only="ranks_forget_and_keep_together",
    ),
    Break(
        name="early-step-taken-twice",
        place="Early.take_over",
        old="return held.keys()",
        new="return ()",
        tests=("test_early_steps.py",),
        only="ranks_forget_and_keep_together",
    ),
    Break(
        name="state-in-files-not-filled",
        place="StateInFile._exchange",
        old="view.copy_(value.view(view.shape))",
        new="pass",
        tests=("test_nvme.py",),
        only="takes_them_back or bitwise_at_every_stage",
    ),
    Break(
        name="state-in-files-not-compared-with-its-checksum",
        place="StoredShard._compare",
        old="_sum_of(chunk) != expected",
        new="False",
        tests=("test_nvme.py",),
        only="changed_in",
    ),
    Break(
        name="layers-left-whole-after-an-evaluation",
        place="Unsharding.after_forward",
        old="                self._drop_all()\n",
        new="                self._drop([self._root])\n",
        tests=("test_grouped_layers.py",),
        only="evaluation",
    ),
    Break(
        name="weights-that-one-rank-has-read-dropped-before-their-backward",
        place="Unsharding._drop",
        old="unit.reshard(keeps=unit in self._kept)",
        new="unit.reshard()",
        tests=("test_stage3.py",),
        only="parent_reads or some_ranks_take",
    ),
    Break(
        name="data-given-in-gathered-lost",
        place="put_back",
        old="            slot.parameter.copy_(value)\n",
        new="",
        tests=("test_stage3.py",),
        only="goes_on_from_edited and some",
    ),
    Break(
        name="root-announced-by-outputs-of-some-ranks",
        place="Unsharding.before_backward",
        old="            return\n",
        new="            pass\n",
        tests=("test_stage3.py",),
        only="without_images",
    ),
    Break(
        name="gradients-of-a-skipped-step-kept",
        place="TrainingStep._before_step",
        old="            self.gradients.drop()\n",
        new="",
        tests=("test_bad_steps.py",),
    ),
    Break(
        name="last-batch-counted-again-on-a-rank-without-batches",
        place="JoinedRanks._backward",
        old="torch.zeros_like",
        new="torch.ones_like",
        tests=("test_uneven_inputs.py",),
    ),
    Break(
        name="late-rank-waited-for",
        place="is_to_end",
        old="return is_of_training and verdict.is_late",
        new="return False",
        tests=("test_late_ranks.py",),
        only="ended_for_a_late_rank",
    ),
    Break(
        name="late-rank-waited-for-in-a-save",
        place="LateWatch._look",
        old="is_over or (is_in_save and others_are_behind(verdict, lookout.begun, SAVE))",
        new="is_to_end(verdict)",
        tests=("test_late_ranks.py",),
        only="in_a_save_a_rank_is_late",
    ),
    Break(
        name="copies-looked-at-behind-the-update-alone",
        place="TrainingStep._before_step",
        old="replicas.before_update(self._log.step, optimizer, buckets)",
        new="pass",
        tests=("test_late_ranks.py",),
        only="bit_that_flips",
    ),
    Break(
        name="copy-on-a-device-not-waited-for",
        place="_Event.hold_up",
        old="stream.wait_event(self._event)",
        new="pass",
        tests=("test_standin_device.py",),
        only="does_everything_late",
    ),
    Break(
        name="parameters-elsewhere-never-written",
        place="OffloadedMemory.write_own",
        old="self._values.write(values)",
        new="pass",
        tests=("test_offload_params.py",),
        only="every_pair",
    ),
    Break(
        name="edits-of-parameters-elsewhere-lost",
        place="OffloadedMemory.keep_edits",
        old="self._values.write(self.source)",
        new="pass",
        tests=("test_offload_params.py",),
        only="a_script_sees",
    ),
    Break(
        name="activations-not-brought-back",
        place="_Moved._bring",
        old="there.copy_(self._values, non_blocking=True)",
        new="there.zero_()",
        tests=("test_offload_activations.py",),
        only="every_stage",
    ),
    Break(
        name="moments-in-blocks-not-packed-again",
        place="StateInBlocks.take_back",
        old="        self._moments.pack(states, self._lent, self.blocks())\n",
        new="",
        tests=("test_moments.py",),
        only="learns_a_text",
    ),
    Break(
        name="rounded-by-the-same-dice-everywhere",
        place="round_row",
        old="offset=offset",
        new="offset=0",
        tests=("test_stochastic_rounding.py",),
    ),
    Break(
        name="whole-parameters-of-a-split-model-counted-on-each-rank",
        place="GradientNorm.measure",
        old="list(filter(self._counts, rows))",
        new="rows",
        tests=("test_split_models.py", "test_split_reports.py"),
        only="transformers_own or parity_is_with",
    ),
    Break(
        name="norm-of-one-part-of-a-split-model",
        place="Agreement.agree_sum",
        old="in self._transports:",
        new="in self._transports[:1]:",
        tests=("test_split_models.py",),
        only="transformers_own and llama",
    ),
    Break(
        name="zero-over-the-ranks-of-a-copy",
        place="ModelCopies.of",
        old="tuple(tuple(sorted(members)) for members in zip(*copies))",
        new="copies",
        tests=("test_split_models.py",),
        only="transformers_own and llama",
    ),
    Break(
        name="parameters-that-are-not-split-never-compared",
        place="CopyChecks.is_due",
        old="step <= _STEPS or (every > 0 and step % every == 0)",
        new="False",
        tests=("test_split_models.py",),
        only="goes_apart",
    ),
    Break(
        name="gradients-of-norms-over-a-split-axis-not-summed",
        place="_SumGradients.backward",
        old="dist.all_reduce(summed, group=ctx.group)",
        new="pass",
        tests=("test_split_models.py",),
        only="transformers_own and qwen3",
    ),
    Break(
        name="part-of-a-split-parameter-saved-by-each-rank-that-has-it",
        place="EngineState.rows_to_save",
        old="if self._is_first_with(row.name)",
        new="if row.name",
        tests=("test_split_checkpoints.py",),
    ),
    Break(
        name="gradients-of-experts-not-made-a-mean-over-their-batches",
        place="SplitModel._to_dtensor",
        old="len(self.ranks) / len(self.copy_ranks)",
        new="1.0",
        tests=("test_split_models.py",),
        only="mixtral",
    ),
    Break(
        name="experts-begun-from-those-of-another-part",
        place="BucketBuilder._start_alike",
        old="self.mesh.group_of(parameter).all_transport",
        new="self.mesh.dp.all_transport",
        tests=("test_split_models.py",),
        only="mixtral",
    ),
    Break(
        name="split-and-whole-parameters-in-one-quantised-block",
        place="Division._spec",
        old="self._quantises and parameter in self._split.parts",
        new="False",
        tests=("test_split_models.py",),
        only="quantised",
    ),
    Break(
        name="blocks-of-other-ranks-read-into-a-part",
        place="_overlap",
        old="slice(start - offset, stop - offset)",
        new="slice(0, stop - start)",
        tests=("test_split_foreign.py", "test_split_experts.py"),
    ),
    *(
        Break(name=name, place=place, old=old, new=new, tests=("test_races.py",), only=only)
        for name, place, only, old, new in UNORDERED
    ),
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of breaks; all of them without a name")
    chosen = parser.parse_args(argv).names
    unknown = set(chosen) - {each.name for each in BREAKS}
    if unknown:
        parser.error(f"no break is named {', '.join(sorted(unknown))}")
    missed = []
    by_name = {each.name: each for each in BREAKS}
    with BrokenTree() as tree:
        for each in [by_name[name] for name in chosen] or BREAKS:
            began_s = time.monotonic()
            caught_by = tree.run(each)
            print(f"{each.name:42} {time.monotonic() - began_s:4.0f} s  {caught_by or 'NOT CAUGHT'}", flush=True)
            if caught_by is None:
                missed.append(each.name)
    return 1 if missed else 0


class BrokenTree:
    """A copy of the tree, in which one break after another is made and mended, as long as the `with` block lasts."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._stack = ExitStack()

    def __enter__(self) -> BrokenTree:
        with ExitStack() as stack:
            self._tree = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="break-")))
            copy_tree(self._root, self._tree)
            self._warm = stack.enter_context(WarmPytest())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, fault: Break) -> str | None:
        """Returns the first test that fails of a break, or None."""
        path, text = broken(fault, self._tree)
        whole = path.read_text(encoding="utf-8")
        try:
            self._write(path, text)
            done = self._warm.run(self._tree, self._arguments(fault), time_limit_s=SECONDS_A_BREAK)
        finally:
            self._write(path, whole)
        if done.status is None:
            return f"the time limit of {SECONDS_A_BREAK} s"
        if done.status == PASSED:
            return None
        failed = [line for line in done.said.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if done.status != FAILED or not failed:
            raise RuntimeError(f"{fault.name}: its tests did not run:\n{done.said[-8000:]}")
        return failed[0].split(" - ")[0]

    def _arguments(self, fault: Break) -> list[str]:
        files = [str(path) for name in fault.tests for path in sorted((self._tree / "tests").rglob(name))]
        only = ["-k", fault.only] if fault.only else []
        return ["-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-m", "not slow", *files, *only]

    @staticmethod
    def _write(path: Path, text: str) -> None:
        """Writes a module; what Python has compiled of it would stand for another of the same second and length."""
        path.write_text(text, encoding="utf-8")
        Path(cache_from_source(path)).unlink(missing_ok=True)


def copy_tree(root: Path, tree: Path) -> None:
    """Copies what tests need of the repository."""
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy(source, tree / name)


def broken(fault: Break, tree: Path) -> tuple[Path, str]:
    """The file that has the break's function, and what it is to hold.

    Raises:
        LookupError: there is no such function, or not one; or it has the text not once.
    """
    found = [
        (path, text.replace(body, body.replace(fault.old, fault.new)))
        for path, text in sources(tree).items()
        for body in functions_named(text, fault.place)
        if body.count(fault.old) == 1
    ]
    if len(found) != 1:
        raise LookupError(
            f"the break {fault.name!r} fits {len(found)} functions {fault.place!r} with {fault.old!r}; give it the name and text "
            "that the engine has now"
        )
    return found[0]


@cache
def sources(tree: Path) -> dict[Path, str]:
    """Path → text of the package in a tree, as they were when it was first asked for."""
    return {path: path.read_text(encoding="utf-8") for path in sorted((tree / PACKAGE).rglob("*.py"))}


def functions_named(text: str, place: str) -> list[str]:
    """The source of each function of that qualified name in a file."""
    *owners, name = place.split(".")
    if f"def {name}(" not in text:
        return []
    nodes = [ast.parse(text)]
    for owner in owners:
        nodes = [
            child for node in nodes for child in node.body if isinstance(child, ast.ClassDef) and child.name == owner
        ]
    bodies = [
        child for node in nodes for child in node.body if isinstance(child, ast.FunctionDef) and child.name == name
    ]
    lines = text.splitlines(keepends=True)
    return ["".join(lines[body.lineno - 1 : body.end_lineno]) for body in bodies]


if __name__ == "__main__":
    raise SystemExit(main())
