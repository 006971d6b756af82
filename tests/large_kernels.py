"""Kernels without a case that a simulator could run."""

#: Operands are packed from 2^20 elements on, and long lists of indices are put in order digit by digit.
LARGE = ("pack_panels", "pack_tiles", "plan_keys", "count_digits", "move_digits")
