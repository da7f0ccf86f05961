"""Autograd's stack of hooks: which are ours, and where a checkpoint decides."""
