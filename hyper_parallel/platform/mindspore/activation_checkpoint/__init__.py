"""Checkpointed blocks and excluded regions on the recompute of MindSpore."""
