"""Which microbatch, which group, what comes next, what stays."""
