"""A checkpoint folder that is there whole or not at all, whoever else writes beside it."""
