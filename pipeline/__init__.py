"""Pipeline parallelism: plans as data, and their execution."""
