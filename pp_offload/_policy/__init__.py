"""What stays, and how much is on its way: decided from numbers alone."""
