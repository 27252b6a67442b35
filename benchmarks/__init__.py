"""Measurements behind the numbers we state: ``python -m benchmarks.NAME [--json out.json]``."""
