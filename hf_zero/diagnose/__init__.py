"""Says whether a machine and a run do as they should: `hf-zero doctor` looks at the set-up, `hf-zero parity` compares with DDP.

The setting `out_of_memory: halve` is here as well: micro-batches that run out of memory are taken again in halves. Its tests are
in `tests/diagnose/`.
"""
