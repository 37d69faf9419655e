"""Subcommands of ``python -m pipeline`` that work on plans, a module each. None of them imports MindSpore."""
