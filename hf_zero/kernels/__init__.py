"""Arithmetic on flat buffers. Each file holds one operation and its torch reference, which is its specification."""
