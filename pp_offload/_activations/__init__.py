"""Offload of all activations on a device, and the stash that gathers saved tensors."""
