"""Eight bits per value between the ends of its block."""
