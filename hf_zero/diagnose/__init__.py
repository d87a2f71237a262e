"""Checks a machine and a run: `hf-zero doctor` checks the set-up, `hf-zero parity` compares a run with DDP.

The setting `out_of_memory: halve` is here as well: micro-batches that run out of memory are taken again in halves. Its tests are
in `tests/diagnose/`.
"""
