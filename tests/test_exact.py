"""kernels/_exact.cl: quick quotients and roots have the bits of division and root wherever they have no doubt. The
numbers are those at which an error of a last place would show; other devices than those that take PTX have none of it.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from mako.lookup import TemplateLookup

from memtrain_cl._resources import kernels_dir
from memtrain_cl.adam_rule import AdamStep
from memtrain_cl.array import from_numpy
from memtrain_cl.device import Device
from memtrain_cl.program import build_options, expand_includes, render
from memtrain_cl.runtimes import import_pyopencl

_CHECKS = """
uint mixed(uint x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

bool same(float a, float b) { return as_uint(a) == as_uint(b); }

// Numbers around b*(q + half a last place) for a random q: their quotients lie next to where rounding turns.
float hard(float b, uint chance) {
    const float q = as_float(0x3f800000u | (mixed(chance) & 0x7fffffu));
    const float product = q * b;
    return as_float(as_uint(product + (fma(q, b, -product) + 0x1p-24f * b)) + chance % 3 - 1);
}

__kernel void check(volatile __global uint *wrong, const uint seed) {
    const uint id = get_global_id(0);
    const uint chance = mixed(seed ^ mixed(id));
    const float b = as_float(0x3f800000u | (chance & 0x7fffffu)), a = hard(b, mixed(chance + 1));
    const float inverse = quick_inverse(b);
    if (!same(inverse, 1.0f / b)) atomic_inc(wrong);

    bool doubt = false;
    const float4 four = (float4)(a, -a, a * 0x1p-40f, a * 0x1p40f);
    const float4 q = quick_quotient(four, (float4)(b), 0x1p-60f, &doubt);
    const float4 part = quick_part(four, (float4)(b, inverse, fma(-inverse, b, 1.0f) * inverse, 0.0f));
    const float4 plain = four / b;
    if (doubt || any(as_uint4(q) != as_uint4(plain))) atomic_inc(wrong + 1);
    if (any(as_uint4(part) != as_uint4(plain))) atomic_inc(wrong + 2);

    // Squares of 24 bits and what lies beside them, from 2^-100 to 2^127.
    const float v = as_float(as_uint(a * a) + chance % 3 - 1) * as_float((27 + chance / 7 % 224) << 23);
    const float4 root = quick_root((float4)(v, 1.0f, 4.0f, 0x1p-101f), &doubt);
    if (doubt || !same(root.x, sqrt(v)) || root.z != 2.0f || !same(root.w, sqrt(0x1p-101f))) atomic_inc(wrong + 3);
    bool small = false, none = false;
    quick_root((float4)(1.0f, 1.0f, 1.0f, 0x1.fffffep-102f), &small);
    quick_quotient((float4)(1.0f, 1.0f, 1.0f, 0.0f), (float4)(1.0f), 0x1p-60f, &none);
    if (!small || !none) atomic_inc(wrong + 3);

    for (uint k = 0; k < 127; k++) {
        const float near = as_float(as_uint((k + 0.5f) * b) + chance % 9 - 4);
        const int4 codes = quick_code((float4)(near, -near, 0.0f, b), b, inverse);
        const float4 rounded = (float4)(near / b, -near / b, 0.0f, 1.0f) + 12582912.0f;
        if (any(codes != as_int4(rounded))) atomic_inc(wrong + 4);
    }
    const float4 bytes = quick_bytes(chance ^ 0x80808080u);
    if (any(bytes != convert_float4(as_char4(chance)))) atomic_inc(wrong + 5);
}
"""


def test_quick_quotients_have_the_bits_of_plain_ones(device: Device) -> None:
    own = render("_exact", {"PTX": int(device.info.inline_ptx)})
    if not device.info.inline_ptx:
        assert "asm" not in own
        return
    cl = import_pyopencl()
    source = f"#pragma OPENCL FP_CONTRACT OFF\n{own}\n{_CHECKS}"
    kernel = cl.Kernel(cl.Program(device.context, source).build(build_options(device)), "check")
    wrong = from_numpy(device, np.zeros(6, np.uint32))
    for seed in range(4):
        kernel(device.queue, (1 << 21,), None, wrong.buffer, np.uint32(seed))
    assert wrong.numpy().tolist() == [0] * 6


# What stands for NVIDIA's approximations elsewhere: numbers near theirs, subnormal ones taken for zero.
_STAND_INS = """
float flushed(float x) { return fabs(x) < 0x1p-126f ? copysign(0.0f, x) : x; }
float near_inverse(float x) { return flushed(as_float(as_uint(1.0f / flushed(x)) ^ 1u)); }
float near_inverse_root(float x) { return isinf(x) ? 0.0f : 1.0f / sqrt(flushed(x)); }
"""
_STEP = """
<%namespace name="own" file="own"/>
typedef float4 vec;
__kernel void update(const __global float4 *numbers, const __global float4 *parts, __global float4 *roots,
                     __global float4 *quotients) {
    const size_t id = get_global_id(0);
    const vec v = numbers[id], a = parts[id];
    const float eps = 1e-8f;
    ${own.root_and_quotient("v", "a", "root + eps", "root + eps", "0x1p-71f")}
    roots[id] = root;
    quotients[id] = q;
}
__kernel void divide(const __global float4 *numbers, const __global float *divisors, __global float4 *quotients) {
    const size_t id = get_global_id(0);
    const float d = divisors[id], inverse = quick_inverse(d);
    quotients[id] = quick_part(numbers[id], (float4)(d, inverse, fma(-inverse, d, 1.0f) * inverse, 0.0f));
}
"""


def _program(device: Device) -> Any:
    if not device.info.subnormals:
        pytest.skip("fma rounds twice, or takes subnormal numbers for zero")
    lookup = TemplateLookup(strict_undefined=True)
    lookup.put_string("own", expand_includes(kernels_dir() / "_exact.cl"))
    lookup.put_string("step", '<%include file="own"/>' + _STEP)
    text = lookup.get_template("step").render(PTX=1)
    text = re.sub(r'asm\("(rcp|rsqrt).approx.ftz.f32 %0, %1;" : "=f"\(near\) : "f"\(([^)]*)\)\);', _stand_in, text)
    text = re.sub(r"inline float4 quick_bytes.*?\n}\n", "", text, flags=re.DOTALL)
    assert "asm" not in text
    source = f"#pragma OPENCL FP_CONTRACT OFF\n{_STAND_INS}\n{text}"
    return import_pyopencl().Program(device.context, source).build(build_options(device))


def test_parts_of_a_scale_are_plain_quotients(device: Device) -> None:
    program = _program(device)
    chance = np.random.default_rng(5)
    divisors = (chance.uniform(1, 2, 1 << 15) * 2.0 ** chance.integers(-76, 20, 1 << 15)).astype(np.float32)
    divisors[0] = 2.0**-76
    # Next to where rounding turns, down to what may be divided.
    places = (chance.integers(1 << 23, 1 << 24, (1 << 15, 4)) + 0.5) * 2.0 ** chance.integers(-48, -16, (1 << 15, 4))
    numbers = (places * divisors.astype(np.float64)[:, None]).astype(np.float32)
    numbers[np.abs(numbers) < 2.0**-100] = 0.0
    arrays = [from_numpy(device, each) for each in (numbers, divisors, np.zeros_like(numbers))]
    kernel = import_pyopencl().Kernel(program, "divide")
    kernel(device.queue, (len(divisors),), None, *(array.buffer for array in arrays))
    assert np.array_equal(arrays[2].numpy(), numbers / divisors[:, None])


def test_quotients_of_a_step_are_plain_ones_where_quick_steps_have_doubt(device: Device) -> None:
    program = _program(device)
    special = np.array(
        [0.0, 1e-45, 1e-39, 2.0**-126, 1e-31, 2.0**-101, 1e-20, 1.0, 3e9, 3e38, np.inf, np.nan], np.float32
    )
    chance = np.random.default_rng(4)
    v, a = (special[chance.integers(0, len(special), (1 << 14, 4))] for _ in range(2))
    v, a = (np.where(chance.random(x.shape) < 0.5, x, 10.0 ** chance.uniform(-40, 30, x.shape)) for x in (v, a))
    # Many vectors have one kind of number to doubt, and zeros.
    a = np.where(chance.random(a.shape) < 0.3, 0.0, a) * chance.choice([-1.0, 1.0], a.shape)
    numbers, parts = v.astype(np.float32), a.astype(np.float32)
    arrays = [
        from_numpy(device, each)
        for each in (numbers, parts, np.zeros_like(v, np.float32), np.zeros_like(v, np.float32))
    ]
    kernel = import_pyopencl().Kernel(program, "update")
    kernel(device.queue, (len(v),), None, *(array.buffer for array in arrays))
    with np.errstate(all="ignore"):
        root = np.sqrt(numbers)
        quotient = parts / (root + np.float32(1e-8))
    for got, want in zip(arrays[2:], (root, quotient), strict=True):
        found = got.numpy()
        assert np.array_equal(np.isnan(found), np.isnan(want))
        real = ~np.isnan(want)
        assert np.array_equal(found[real].view(np.uint32), want[real].view(np.uint32))


def _stand_in(found: re.Match[str]) -> str:
    return f"near = {'near_inverse' if found[1] == 'rcp' else 'near_inverse_root'}({found[2]});"


@pytest.mark.parametrize("step", [1, 2, 10, 1000, 10**6])
@pytest.mark.parametrize("beta2", [0.0, 0.5, 0.99, 0.999, 1 - 1e-9])
def test_what_a_step_says_of_its_quotients(beta2: float, step: int) -> None:
    rule = AdamStep(lr=1e-3, beta2=beta2, step=step)
    inverse, rest, least = rule.quick
    root2 = float(np.float32(rule.root2))
    if root2 < 2.0**-20:
        assert least == np.inf
    else:
        assert abs((inverse + float(np.float32(rest))) * root2 - 1.0) < 2.0**-45
        assert least * rule.eps >= 2.0**-98
