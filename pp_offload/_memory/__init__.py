"""Memory: host memory under one budget, disk space, and pools of tensors."""
