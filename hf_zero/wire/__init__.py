"""Fewer bytes between ranks: gradients and parameters in int8 blocks, and outer steps between groups of ranks.

The settings are `comm.gradients`, `comm.weights` and `comm.sync_every`; `docs/slow-links.md` shows their costs and savings. Tests
are in `tests/wire/`.
"""
