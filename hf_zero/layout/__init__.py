"""Integer arithmetic only: intervals, slots of parameters in buckets, shards, quantized blocks, and boxes of split tensors."""

from .buckets import ParameterSpec, plan_buckets, rows_of_shard

__all__ = ["ParameterSpec", "plan_buckets", "rows_of_shard"]
