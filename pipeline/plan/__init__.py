"""Pipeline plans as data. Pure Python: nothing here imports MindSpore."""
