"""What moves and in which order: nothing else orders copies and compute."""
