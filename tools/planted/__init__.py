"""Faults that are planted while the core tests run: each of them has to be caught."""
