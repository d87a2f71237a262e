"""Runs that go on, on other ranks, after a launcher has restarted them."""
