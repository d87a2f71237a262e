"""Tiers: the memory of a shard's state and parameters, and of activations, outside of the training device."""
