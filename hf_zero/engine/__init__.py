"""One training step: gradients into buckets, buckets over the ranks, the optimizer over shards, parameters back."""
