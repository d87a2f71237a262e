"""Where a shard's state lives."""
