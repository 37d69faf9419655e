"""Activation recompute with excluded regions, and the platform layer beneath it."""
