"""Secondary shards: parameters that a forward gathered stay sharded inside the node for its backward."""

import torch

from ..buckets.bucket import Bucket
from ..comm.groups import RankGroup
from ..comm.transport import Handle
from ..step.gathers import GATHER, Gather, start_all_gather

# ZeRO++'s hierarchical partitioning, hpZ (Wang et al. 2023, arXiv 2306.10209). On nodes of n ranks, a rank keeps 1/n of the
# parameters from their forward to the step, so the gathers of the backward send nothing between nodes.


class ForwardGather(Gather):
    """Gathers from all ranks, and keeps this rank's part of the node's copy for a following backward.

    Args:
        whole: gathers from all ranks.
        node: the ranks of this node.

    Attributes:
        kept: this rank's part of each bucket gathered since the last step, (numel / node.size,).
    """

    takes_edits = False

    def __init__(self, whole: Gather, node: RankGroup):
        super().__init__()
        self._whole = whole
        self.node = node
        self.kept: dict[Bucket, torch.Tensor] = {}

    @property
    def held_bytes(self) -> int:
        return sum(part.nbytes for part in self.kept.values())

    def start(self, bucket: Bucket) -> Handle:
        handle = self._whole.start(bucket)
        # No backward follows an evaluation.
        if not torch.is_grad_enabled():
            return handle

        def complete() -> None:
            handle.finish()
            # Copied, because the gathered memory is freed after the forward.
            self.kept[bucket] = bucket.flat.view(self.node.size, -1)[self.node.index].clone()

        return Handle(bucket.labels[GATHER], bucket.group.transport.ledger, complete)

    def forget(self) -> None:
        self.kept.clear()


class BackwardGather(Gather):
    """Gathers kept parts inside the node, and other parts from all ranks."""

    takes_edits = False

    def __init__(self, forward: ForwardGather):
        super().__init__()
        self._forward = forward

    def start(self, bucket: Bucket) -> Handle:
        # None, on all ranks, if no training forward has gathered the bucket since the last step.
        part = self._forward.kept.get(bucket)
        if part is None:
            return self._forward.start(bucket)
        label = bucket.labels["all-gather of parameters in the node"]
        return start_all_gather(bucket, bucket.flat, part, label, among=self._forward.node)
