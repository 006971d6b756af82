"""Elementwise operations that programs meet less often: shifts, divisors, decimals, neighbours, thresholds' slopes."""

from __future__ import annotations

from typing import Any

from memtrain_cl.torch_device.aten.elementwise import binary
from memtrain_cl.torch_device.aten.pointwise import pointwise
from memtrain_cl.torch_device.registry import aten

# A shift by more than the type's bits leaves 0, or the sign.
for _name, _body in (
    ("left", "y0 = ({b} < 0 || {b} >= 8 * (long)sizeof({a})) ? 0 : {a} << {b};"),
    ("right", "y0 = ({b} < 0 || {b} >= 8 * (long)sizeof({a})) ? ({a} < 0 ? -1 : 0) : {a} >> {b};"),
):
    _shift = binary({"bool": "", "whole": _body})
    for _overload in ("Tensor", "Tensor_Scalar", "Scalar_Tensor"):
        pointwise(getattr(getattr(aten, f"bitwise_{_name}_shift"), _overload), "", arrange=_shift)
    for _overload in ("Tensor", "Scalar"):
        pointwise(getattr(getattr(aten, f"__{_name[0]}shift__"), _overload), "", arrange=_shift)

for _name, _sign in (("and", "&"), ("or", "|"), ("xor", "^")):
    _bits = binary({"whole": f"y0 = {{a}} {_sign} {{b}};"})
    pointwise(getattr(aten, f"bitwise_{_name}").Scalar_Tensor, "", arrange=_bits)

_DIVISOR = (
    "long a = x0 < 0 ? -(long)x0 : x0, b = x1 < 0 ? -(long)x1 : x1; "
    "while (b != 0) { const long r = a % b; a = b; b = r; }"
)
pointwise(aten.gcd.default, {"whole": f"{_DIVISOR} y0 = a;"})
pointwise(aten.lcm.default, {"whole": f"{_DIVISOR} y0 = a == 0 ? 0 : x0 / a * x1; y0 = y0 < 0 ? -y0 : y0;"})


def _round(self: Any, *, decimals: int = 0) -> Any:
    if not self.is_floating_point():
        return (self,), "y0 = x0;"
    if decimals < 0:
        return (self, 10.0**-decimals), "y0 = rint(x0 / s0) * s0;"
    return (self, 10.0**decimals), "y0 = rint(x0 * s0) / s0;"


pointwise(aten.round.decimals, "", arrange=_round)
pointwise(
    aten.angle.default,
    {"float": "y0 = isnan(x0) ? x0 : x0 < 0.0f ? M_PI_F : 0.0f;", "whole": "y0 = x0 < 0 ? M_PI_F : 0.0f;"},
)
pointwise(aten.nextafter.default, {"float32": "y0 = nextafter(x0, x1);"})


def _celu(self: Any, alpha: float = 1.0) -> Any:
    if alpha == 0:
        raise RuntimeError("ZeroDivisionError: alpha cannot be 0 for CELU")
    return (self, float(alpha)), "y0 = x0 > 0.0f ? x0 : expm1(x0 / s0) * s0;"


pointwise(aten.celu.default, "", arrange=_celu)
_BETWEEN = {"float": "y0 = (x1 >= -s0 && x1 <= s0) ? 0.0f : x0;"}
pointwise(aten.hardshrink_backward.default, _BETWEEN)
pointwise(aten.softshrink_backward.default, _BETWEEN)
