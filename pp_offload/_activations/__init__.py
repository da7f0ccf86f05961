"""All activations of a model on one device, without groups to mark."""
