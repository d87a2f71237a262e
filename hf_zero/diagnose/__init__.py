"""Looks at a set-up or a run and says what is wrong with it."""
