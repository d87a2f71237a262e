"""Checks whether a run computes the right values, and says how to mend faults."""
