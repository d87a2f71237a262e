"""Memory of other ranks on the same host that this rank reads directly."""
