"""The ranks which are present, late or lost: waits through the store, the watchdog, and the errors of a failed run."""
