"""Kernels without a case that a simulator could run."""

#: Operands are packed from 2^20 elements on, long lists of indices are put in order digit by digit, rows are cut into
#: parts of 2^14 elements at least.
LARGE = ("pack_panels", "pack_tiles", "plan_keys", "count_digits", "move_digits", "absmax_rows", "scaled_rows")
