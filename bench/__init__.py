"""Measurements: ``python -m bench [family ...] [--device X] [--out FILE]``. Never tests: machines are shared."""
