"""Optimizer steps by flat kernels."""
