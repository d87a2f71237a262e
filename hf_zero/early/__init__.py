"""Steps of offloaded state while backward goes on: a bucket is stepped on copies as soon as its gradient is in host memory.

`optimizer.step()` takes over what still holds, and steps the other buckets itself: the bits are those of steps in their time.
The setting is `offload.speculate_bytes`, which says how much the copies may take. Its tests are in `tests/early/`.
"""
