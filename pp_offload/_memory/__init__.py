"""Where bytes are: allocators, host memory under one budget, disk, pools."""
