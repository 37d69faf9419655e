"""The multi-device regression matrix: cases, their models, the worker that runs them, and the report."""
