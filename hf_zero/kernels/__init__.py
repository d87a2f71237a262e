"""Triton kernels in place of torch operations: the norm of the gradients, and the steps of AdamW, Adam, SGD and Lion.

The setting is `kernels`: with `auto`, kernels are used if triton is installed and the device is a CUDA device. Each kernel has a
reference in torch that computes the same bits. Tests are in `tests/kernels/` and need no GPU.
"""
