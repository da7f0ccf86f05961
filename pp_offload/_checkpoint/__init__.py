"""Recomputation: what a checkpoint keeps, offloads or computes again."""
