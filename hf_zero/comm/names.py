"""The flat collectives of torch.distributed under one name: torch 2.13 renamed them."""

import torch.distributed as dist

reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""`(output, input, op, group, async_op)` on contiguous tensors."""

all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""`(output, input, group, async_op)` on contiguous tensors."""
