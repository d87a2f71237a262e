"""Arithmetic on flat tensors in torch. Triton kernels do the same arithmetic where Triton runs."""
