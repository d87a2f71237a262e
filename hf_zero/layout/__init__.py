"""Integer arithmetic only: intervals, slots of parameters in buckets, shards, quantised blocks, and boxes of split tensors."""
