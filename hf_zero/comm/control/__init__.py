"""Small messages between the ranks, waits with a time limit, and errors that name the rank that is late."""
