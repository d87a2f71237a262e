"""Flat buffers of parameters, their memory, and the stand-ins for sharded parameters and gradients."""
