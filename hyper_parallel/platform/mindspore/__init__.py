"""The only code that touches private interfaces of MindSpore, one file per interface."""
