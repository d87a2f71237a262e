"""Fewer bytes between ranks: gradients and parameters in int8 or int4 blocks, and outer steps between groups of ranks.

Its settings are `comm.gradients`, `comm.weights` and `comm.sync_every`; what they cost and save stands in `docs/slow-links.md`.
Its tests are in `tests/wire/`.
"""
