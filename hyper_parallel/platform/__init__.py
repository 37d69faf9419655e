"""Selection of the platform that runs the recompute."""
