"""The manager of the process, with the methods that Megatron's users know, and what they call."""
