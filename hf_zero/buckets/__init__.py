"""Flat buffers of parameters, where they lie in memory, and what stands in for parameters and gradients that are sharded."""
