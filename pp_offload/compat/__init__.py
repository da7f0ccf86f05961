"""Modules that stand in for those of other libraries, name by name."""
