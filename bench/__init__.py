"""Measurements: ``python -m bench [family ...] [--device X] [--out FILE]``. Never tests: machines are shared."""

from memtrain_cl.runtimes import share_cores

share_cores()  # as the command line does, before any bench imports torch
