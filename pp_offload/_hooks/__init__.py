"""Autograd's stack of hooks: our hooks on it, and regions that a checkpoint decides."""
