"""The optimizer's step over this rank's shards: its state, where each bucket's state is held, and when and how it is stepped."""
