"""Which microbatch, which group, what stays on the device, and what a step teaches the next."""
