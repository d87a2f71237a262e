"""Whether a run computes what it should, and what to do where it does not."""
