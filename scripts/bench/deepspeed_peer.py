"""DeepSpeed's engine behind the calls of the others."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from training_loop import Engine, MakeModel, OptimizerArguments

SETTINGS = (
    "deepspeed.initialize with torch's AdamW (zero_allow_untested_optimizer), overlap_comm and contiguous_gradients as its "
    "documentation advises, buckets of 25 MB, no clipping; its collectives in shared memory are off, so that bytes are counted"
)
_BUCKET_NUMEL = 25_000_000 // 4


class DeepSpeed(Engine):
    """DeepSpeed's own loop: its engine does backward and steps."""

    def backward(self, loss: torch.Tensor) -> None:
        self.model.backward(loss)

    def update(self) -> None:
        self.model.step()

    def close(self) -> None:
        self.model.destroy()
        super().close()


def make_deepspeed(make_model: MakeModel, optimizer_arguments: OptimizerArguments, *, stage: int) -> Engine:
    """ZeRO at this stage; 0 is DeepSpeed's own data parallelism."""
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_SIZE=world_size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    import deepspeed

    # Compiled when it is first asked for, and without bytes on a socket.
    # The package's own `torch` is the real one; only the module has this function.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    zero: dict[str, object] = {"stage": stage}
    if stage:
        zero |= {
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": _BUCKET_NUMEL,
            "allgather_bucket_size": _BUCKET_NUMEL,
        }
    model = make_model()
    engine, optimizer, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), **optimizer_arguments),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            # It clips at 1.0 by default, and the others do not clip.
            "gradient_clipping": 0.0,
        },
    )
    return DeepSpeed(engine, optimizer)
