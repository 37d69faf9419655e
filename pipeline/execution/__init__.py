"""Execution of a plan on MindSpore."""
