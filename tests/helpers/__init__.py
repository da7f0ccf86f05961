"""Helpers of tests that use public names only."""
