"""The manager of the process, with the methods that Megatron's users know, and what they call."""

# Registers what a forked process does, before there can be a manager.
from pp_offload._megatron import forked as forked
