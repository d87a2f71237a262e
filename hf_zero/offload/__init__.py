"""Where a shard's state and parameters live, and activations."""
