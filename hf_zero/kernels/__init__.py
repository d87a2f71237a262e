"""Triton kernels in place of torch's operations: the norm of the gradients, and the steps of AdamW, Adam, SGD and Lion.

The setting is `kernels`: `auto` takes them where triton is installed and the device is a CUDA one, `always` and `never` say so.
Each kernel has a reference in torch, with which it agrees bit for bit. Its tests are in `tests/kernels/`, and need no GPU.
"""
