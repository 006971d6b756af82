"""Measurements: ``python -m bench [family ...] [--device X] [--out FILE]``. They are never tests: machines differ and are shared."""
