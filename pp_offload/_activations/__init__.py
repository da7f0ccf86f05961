"""All activations of a model on one device; and the stash that they, and checkpoints, gather in."""
