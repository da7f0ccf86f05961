"""Parameters in slices, two of them on the device."""
