"""Which ranks are present, late or lost: waits through the store, the watchdog, and the errors that end a run."""
