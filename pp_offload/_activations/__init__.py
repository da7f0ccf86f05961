"""Offload of all activations on one device; and the stash that gathers saved tensors."""
