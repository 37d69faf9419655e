"""Public functions of activation recompute."""
