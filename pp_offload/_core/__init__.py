"""What was saved, where its bytes are, what waits for what, and what comes back next."""
