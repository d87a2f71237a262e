"""Tiers for a shard's state and parameters, and for activations."""
