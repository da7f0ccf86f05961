"""Programs of the ranks that tests start."""
