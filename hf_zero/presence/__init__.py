"""Detects late and lost ranks: waits through the store, the watchdog, and the errors of a failed run."""
