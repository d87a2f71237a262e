"""Where optimizer state lies between steps, and when each bucket is stepped."""
