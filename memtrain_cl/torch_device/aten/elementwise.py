"""The elementwise operations: what each computes, in OpenCL C."""

from __future__ import annotations

import math
from typing import Any

from memtrain_cl.torch_device.aten.pointwise import Bodies, pointwise
from memtrain_cl.torch_device.registry import aten

# ---- one argument, computed in float32 -----------------------------------------------------------------------------
for _name in (
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "erfc", "exp", "exp2", "expm1", "log"),
    *("log10", "log1p", "log2", "sin", "sinh", "sqrt", "tan", "tanh"),
):
    pointwise(getattr(aten, _name).default, f"y0 = {_name}(x0);", floats=True)
pointwise(aten.rsqrt.default, "y0 = 1.0f / sqrt(x0);", floats=True)
pointwise(aten.reciprocal.default, "y0 = 1.0f / x0;", floats=True)
pointwise(aten.sigmoid.default, "y0 = sigmoid_of(x0);", floats=True)

# ---- one argument, of its own type ---------------------------------------------------------------------------------
pointwise(aten.neg.default, "y0 = -x0;")
pointwise(aten.abs.default, {"float": "y0 = fabs(x0);", "whole": "y0 = x0 < 0 ? -x0 : x0;"})
_SIGN = {"float": "y0 = (float)((x0 > 0.0f) - (x0 < 0.0f));", "whole": "y0 = (x0 > 0) - (x0 < 0);"}
pointwise(aten.sign.default, _SIGN)
pointwise(aten.sgn.default, _SIGN)
for _name, _body in (("floor", "floor"), ("ceil", "ceil"), ("round", "rint"), ("trunc", "trunc")):
    pointwise(getattr(aten, _name).default, {"float": f"y0 = {_body}(x0);", "whole": "y0 = x0;"})
pointwise(aten.frac.default, {"float": "y0 = x0 - trunc(x0);"})
pointwise(aten.relu.default, {"float": "y0 = x0 < 0.0f ? 0.0f : x0;", "whole": "y0 = x0 < 0 ? 0 : x0;"})
pointwise(aten.isnan.default, {"float": "y0 = isnan(x0) ? 1 : 0;", "whole": "y0 = 0;"})
pointwise(aten.isinf.default, {"float": "y0 = isinf(x0) ? 1 : 0;", "whole": "y0 = 0;"})
pointwise(aten.signbit.default, {"float": "y0 = signbit(x0) ? 1 : 0;", "whole": "y0 = x0 < 0;"})
pointwise(aten.logical_not.default, "y0 = x0 == 0;")
pointwise(aten.bitwise_not.default, {"bool": "y0 = x0 == 0;", "whole": "y0 = ~x0;"})


def _nan_to_num(self: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Any:
    limit = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}.get(self.operand.element, 3.4028234663852886e38)
    if not self.is_floating_point():
        return (self,), "y0 = x0;"
    values = (nan or 0.0, limit if posinf is None else posinf, -limit if neginf is None else neginf)
    return (self, *map(float, values)), "y0 = isnan(x0) ? s0 : isinf(x0) ? (x0 > 0.0f ? s1 : s2) : x0;"


pointwise(aten.nan_to_num.default, "", arrange=_nan_to_num)

# ---- activations ---------------------------------------------------------------------------------------------------
_FLOAT = "float"
pointwise(aten.silu.default, {_FLOAT: "y0 = x0 * sigmoid_of(x0);"})
pointwise(
    aten.silu_backward.default,
    {_FLOAT: "const float s = sigmoid_of(x1); y0 = x0 * s * (1.0f + x1 * (1.0f - s));"},
)
_GELU = {"none": "gelu", "tanh": "gelu_tanh"}
pointwise(
    aten.gelu.default,
    "",
    arrange=lambda self, approximate="none": ((self,), f"y0 = {_GELU[approximate]}_of(x0);"),
)
pointwise(
    aten.gelu_backward.default,
    "",
    arrange=lambda grad, self, approximate="none": ((grad, self), f"y0 = x0 * {_GELU[approximate]}_slope(x1);"),
)
pointwise(aten.sigmoid_backward.default, {_FLOAT: "y0 = x0 * x1 * (1.0f - x1);"})
pointwise(aten.tanh_backward.default, {_FLOAT: "y0 = x0 * (1.0f - x1 * x1);"})
pointwise(aten.threshold_backward.default, {_FLOAT: "y0 = x1 <= s0 ? 0.0f : x0;", "whole": "y0 = x1 <= s0 ? 0 : x0;"})
pointwise(aten.threshold.default, "y0 = x0 <= s0 ? s1 : x0;")
pointwise(
    aten.leaky_relu.default,
    "",
    arrange=lambda self, negative_slope=0.01: ((self, float(negative_slope)), "y0 = x0 > 0.0f ? x0 : x0 * s0;"),
)
pointwise(
    aten.leaky_relu_backward.default,
    "",
    arrange=lambda grad, self, slope, is_result: ((grad, self, float(slope)), "y0 = x1 > 0.0f ? x0 : x0 * s0;"),
)


def _elu(self: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    body = "y0 = x0 > 0.0f ? x0 * s1 : expm1(x0 * s2) * s0 * s1;"
    return (self, float(alpha), float(scale), float(input_scale)), body


def _elu_backward(grad: Any, alpha: float, scale: float, input_scale: float, is_result: bool, value: Any) -> Any:
    negative = "(x1 + s0 * s1)" if is_result else "s0 * s1 * exp(x1 * s2)"
    body = f"y0 = x1 > 0.0f ? x0 * s1 : x0 * s2 * {negative};"
    return (grad, value, float(alpha), float(scale), float(input_scale)), body


pointwise(aten.elu.default, "", arrange=_elu)
pointwise(aten.elu_backward.default, "", arrange=_elu_backward)
pointwise(
    aten.softplus.default,
    "",
    arrange=lambda self, beta=1, threshold=20: (
        (self, float(beta), float(threshold)),
        "y0 = x0 * s0 > s1 ? x0 : log1p(exp(x0 * s0)) / s0;",
    ),
)
pointwise(
    aten.softplus_backward.default,
    "",
    arrange=lambda grad, self, beta, threshold: (
        (grad, self, float(beta), float(threshold)),
        "y0 = x1 * s0 > s1 ? x0 : x0 * sigmoid_of(x1 * s0);",
    ),
)
# tanh(log(1 + w)) = n/(n + 2) with n = w*(w + 2), w = exp(x).
_MISH = "const float w = exp(fmin(x0, 20.0f)); const float n = w * (w + 2.0f);"
pointwise(aten.mish.default, {_FLOAT: _MISH + " y0 = isnan(x0) ? x0 : x0 * (n / (n + 2.0f));"})
pointwise(aten.hardsigmoid.default, {_FLOAT: "y0 = fmin(fmax(x0 + 3.0f, 0.0f), 6.0f) / 6.0f;"})
pointwise(aten.hardsigmoid_backward.default, {_FLOAT: "y0 = (x1 > -3.0f && x1 < 3.0f) ? x0 / 6.0f : 0.0f;"})
pointwise(aten.hardswish.default, {_FLOAT: "y0 = x0 * fmin(fmax(x0 + 3.0f, 0.0f), 6.0f) / 6.0f;"})
pointwise(
    aten.hardswish_backward.default,
    {_FLOAT: "y0 = x1 <= -3.0f ? 0.0f : x1 < 3.0f ? x0 * (x1 / 3.0f + 0.5f) : x0;"},
)
pointwise(
    aten.hardtanh.default,
    "",
    arrange=lambda self, low=-1, high=1: ((self, low, high), "y0 = x0 < s0 ? s0 : x0 > s1 ? s1 : x0;"),
)
pointwise(
    aten.hardtanh_backward.default,
    "",
    arrange=lambda grad, self, low, high: (
        (grad, self, float(low), float(high)),
        "y0 = (x1 <= s0 || x1 >= s1) ? 0.0f : x0;",
    ),
)

# ---- arithmetic of two ---------------------------------------------------------------------------------------------


def _second(other: Any) -> str:
    """x1 for a tensor, s0 for a number."""
    return "s0" if isinstance(other, (int, float)) else "x1"


def _add(self: Any, other: Any, *, alpha: Any = 1, sign: str = "+") -> Any:
    b = _second(other)
    if not isinstance(self, (int, float)) and alpha == 1:
        return (self, other), f"y0 = x0 {sign} {b};"
    if isinstance(self, (int, float)):
        return (other, self, alpha), f"y0 = s0 {sign} s1 * x0;"
    return (self, other, alpha), f"y0 = x0 {sign} {'s1' if b == 's0' else 's0'} * {b};"


def _sub(self: Any, other: Any, *, alpha: Any = 1) -> Any:
    return _add(self, other, alpha=alpha, sign="-")


def _rsub(self: Any, other: Any, *, alpha: Any = 1) -> Any:
    if isinstance(other, (int, float)):
        return (self, other, alpha), "y0 = s0 - s1 * x0;"
    return (self, other, alpha), "y0 = x1 - s0 * x0;"


def binary(body: Bodies) -> Any:
    """`body` over {a} and {b}, either of which may be a number."""

    def arrange(self: Any, other: Any) -> Any:
        if isinstance(self, (int, float)):
            return (other, self), _written(body, "s0", "x0")
        return (self, other), _written(body, "x0", _second(other))

    return arrange


_texts: dict[tuple[str, str, str], Any] = {}


def _written(body: Any, a: str, b: str) -> Any:
    key = (str(body), a, b)
    if key not in _texts:
        fill = {"a": a, "b": b}
        _texts[key] = (
            body.format_map(fill) if isinstance(body, str) else {k: v.format_map(fill) for k, v in body.items()}
        )
    return _texts[key]


for _overload in ("Tensor", "Scalar"):
    pointwise(getattr(aten.add, _overload), "", arrange=_add)
    pointwise(getattr(aten.sub, _overload), "", arrange=_sub)
    pointwise(getattr(aten.rsub, _overload), "", arrange=_rsub)
    pointwise(getattr(aten.mul, _overload), "", arrange=binary("y0 = {a} * {b};"))
    pointwise(getattr(aten.div, _overload), "", floats=True, arrange=binary("y0 = {a} / {b};"))
    pointwise(
        getattr(aten.remainder, _overload),
        "",
        arrange=binary(
            {
                "float": "y0 = remainder_of({a}, {b});",
                "whole": "y0 = {b} == 0 ? 0 : {a} % {b}; if (y0 != 0 && ((y0 < 0) != ({b} < 0))) y0 += {b};",
            }
        ),
    )
    pointwise(
        getattr(aten.fmod, _overload),
        "",
        arrange=binary({"float": "y0 = fmod({a}, {b});", "whole": "y0 = {b} == 0 ? 0 : {a} % {b};"}),
    )
    for _name, _sign in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">=")):
        pointwise(getattr(getattr(aten, _name), _overload), "", arrange=binary(f"y0 = {{a}} {_sign} {{b}};"))
    for _name, _sign in (("and", "&"), ("or", "|"), ("xor", "^")):
        pointwise(
            getattr(getattr(aten, f"bitwise_{_name}"), _overload),
            "",
            arrange=binary({"whole": f"y0 = {{a}} {_sign} {{b}};"}),
        )

_DIV_MODES: dict[Any, Any] = {
    "floor": {
        "float": "y0 = floor_div({a}, {b});",
        "whole": "y0 = {b} == 0 ? 0 : {a} / {b}; if ({b} != 0 && y0 * {b} != {a} && (({a} < 0) != ({b} < 0))) y0 -= 1;",
    },
    "trunc": {"float": "y0 = trunc({a} / {b});", "whole": "y0 = {b} == 0 ? 0 : {a} / {b};"},
}


def _div_mode(self: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return NotImplemented if not self.is_floating_point() else binary("y0 = {a} / {b};")(self, other)
    return binary(_DIV_MODES[rounding_mode])(self, other)


for _overload in ("Tensor_mode", "Scalar_mode"):
    pointwise(getattr(aten.div, _overload), "", arrange=_div_mode)
pointwise(aten.floor_divide.default, "", arrange=binary(_DIV_MODES["floor"]))
for _name, _sign in (("and", "&&"), ("or", "||")):
    pointwise(getattr(aten, f"logical_{_name}").default, f"y0 = (x0 != 0) {_sign} (x1 != 0);")
pointwise(aten.logical_xor.default, "y0 = (x0 != 0) != (x1 != 0);")
pointwise(
    aten.maximum.default,
    {"float": "y0 = isnan(x0) ? x0 : isnan(x1) ? x1 : fmax(x0, x1);", "whole": "y0 = max(x0, x1);"},
)
pointwise(
    aten.minimum.default,
    {"float": "y0 = isnan(x0) ? x0 : isnan(x1) ? x1 : fmin(x0, x1);", "whole": "y0 = min(x0, x1);"},
)
pointwise(aten.fmax.default, {"float": "y0 = fmax(x0, x1);", "whole": "y0 = max(x0, x1);"})
pointwise(aten.fmin.default, {"float": "y0 = fmin(x0, x1);", "whole": "y0 = min(x0, x1);"})
pointwise(aten.atan2.default, "y0 = atan2(x0, x1);", floats=True)
pointwise(aten.hypot.default, {"float": "y0 = hypot(x0, x1);"})
for _overload in ("Tensor", "Scalar"):
    pointwise(getattr(aten.copysign, _overload), "", floats=True, arrange=binary("y0 = copysign({a}, {b});"))


def _pow(self: Any, exponent: Any) -> Any:
    if isinstance(self, (int, float)):
        return (exponent, self), _POW_NUMBER
    if not isinstance(exponent, (int, float)):
        return (self, exponent), _POW_TENSORS
    short = {2: "y0 = x0 * x0;", 3: "y0 = x0 * x0 * x0;", 1: "y0 = x0;", 0.5: "y0 = sqrt(x0);", -1: "y0 = 1.0f / x0;"}
    if not self.is_floating_point() and not isinstance(exponent, float):
        if exponent < 0:
            raise RuntimeError("Integers to negative integer powers are not allowed.")
        return (self, exponent), _POW_WHOLE
    return (self, float(exponent)), _POWERS.setdefault(exponent, short.get(exponent, "y0 = pow(x0, s0);"))


_POW_NUMBER = {"float": "y0 = pow(s0, x0);", "whole": "y0 = power_of_long(s0, x0);"}
_POW_TENSORS = {"float": "y0 = pow(x0, x1);", "whole": "y0 = power_of_long(x0, x1);"}
_POW_WHOLE = {"whole": "y0 = power_of_long(x0, s0);"}
_POWERS: dict[float, str] = {}
pointwise(aten.pow.Tensor_Tensor, "", arrange=_pow)
pointwise(aten.pow.Tensor_Scalar, "", arrange=_pow)
pointwise(aten.pow.Scalar, "", arrange=_pow)

# ---- of three ------------------------------------------------------------------------------------------------------
pointwise(aten.where.self, "y0 = x0 != 0 ? x1 : x2;", raw=1)


def _masked(self: Any, mask: Any, value: Any) -> Any:
    if isinstance(value, (int, float)):
        # As the type that torch gives the result: self's.
        kind = float if self.is_floating_point() else int
        return (mask, self, kind(value)), "y0 = x0 != 0 ? s0 : x1;"
    return (mask, self, value), "y0 = x0 != 0 ? x2 : x1;"


for _overload in ("Scalar", "Tensor"):
    pointwise(getattr(aten.masked_fill, _overload), "", raw=1, arrange=_masked)


def _addc(sign: str) -> Any:
    def arrange(self: Any, one: Any, two: Any, *, value: Any = 1) -> Any:
        return (self, one, two, value), f"y0 = x0 + s0 * x1 {sign} x2;"

    return arrange


pointwise(aten.addcmul.default, "", arrange=_addc("*"))
pointwise(aten.addcdiv.default, "", arrange=_addc("/"))
_LERP = "y0 = fabs({w}) < 0.5f ? x0 + {w} * (x1 - x0) : x1 - (x1 - x0) * (1.0f - {w});"
pointwise(aten.lerp.Scalar, {"float": _LERP.format(w="s0")})
pointwise(aten.lerp.Tensor, {"float": _LERP.format(w="x2")})


def _clamp(self: Any, low: Any = None, high: Any = None) -> Any:
    if low is None and high is None:
        raise RuntimeError("torch.clamp: At least one of 'min' or 'max' must not be None")
    number = isinstance(low, (int, float)) or isinstance(high, (int, float))
    names = ["s0", "s1"] if number else ["x1", "x2"]
    values, body = [self], "y0 = x0;"
    for bound, sign in ((low, "<"), (high, ">")):
        if bound is not None:
            name = names[len(values) - 1]
            body += f" y0 = y0 {sign} {name} ? {name} : y0;"
            if not number:
                body += f" y0 = {name} != {name} ? {name} : y0;"
            values.append(bound)
    if number and any(isinstance(v, float) and math.isnan(v) for v in values[1:]):
        return (self, math.nan), "y0 = s0;"
    return tuple(values), body


pointwise(aten.clamp.default, "", arrange=_clamp)
pointwise(aten.clamp.Tensor, "", arrange=_clamp)
pointwise(aten.clamp_min.default, "", arrange=lambda self, low: _clamp(self, low))
pointwise(aten.clamp_min.Tensor, "", arrange=lambda self, low: _clamp(self, low))
pointwise(aten.clamp_max.default, "", arrange=lambda self, high: _clamp(self, None, high))
pointwise(aten.clamp_max.Tensor, "", arrange=lambda self, high: _clamp(self, None, high))
