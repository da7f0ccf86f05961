"""Which microbatch, which group: from the start of a group to its last use in backward."""
