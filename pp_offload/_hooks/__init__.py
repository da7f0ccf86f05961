"""Autograd's stack of hooks: which are ours, and what a checkpoint runs again."""
