"""Saved tensors, batches, the order of their copies, and reloads ahead of backward."""
