"""Checks that a user runs, or that run at the start, to find what would go wrong later."""
