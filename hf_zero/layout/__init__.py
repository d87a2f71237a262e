"""Integers only: where each parameter, shard and saved interval begins and ends. No tensors, no process groups."""
