"""Offload in the training loops of others."""
