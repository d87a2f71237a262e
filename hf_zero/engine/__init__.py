"""One training step: gradients into buckets, buckets over the ranks, the optimizer over shards, parameters back."""

from ..versions import refuse_old_libraries

refuse_old_libraries()
