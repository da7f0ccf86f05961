"""Parameters in slices, a few of them on the device."""
