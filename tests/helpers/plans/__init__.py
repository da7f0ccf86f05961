"""Random pipelines, and what their plans are compared with."""
