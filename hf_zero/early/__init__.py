"""Early steps of offloaded state: a bucket is stepped on copies during backward, as soon as its gradient is in host memory.

`optimizer.step()` uses the early steps that are still valid and steps the other buckets itself. The result has the same bits as
without early steps. The setting is `offload.speculate_bytes`, which limits the memory of the copies. Tests are in `tests/early/`.
"""
