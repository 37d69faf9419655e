"""Platform independent part of activation recompute."""
