"""Forecasts before a run: memory of every set-up, the choice of one, the time of a step."""
