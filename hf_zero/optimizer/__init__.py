"""The optimizer's step over this rank's rows: the state, its memory, and the time of each bucket's step."""
