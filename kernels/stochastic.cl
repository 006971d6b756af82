// Quantisation of rows to few bits, stochastic or half to even, and the way back.
//
// x [outer, length, inner] of float32, float16 or bfloat16, computed in float32; a row is the `length` elements of one (outer, inner).
//
//   v = x, or x * multiplier[place in the row]     rounded; |v| < 2^-126 counts as 0
//   scale = max(max |v|, 1e-12) / levels           NaN where an element is not finite, and the codes are then 0
//   y = v / scale
//   code = floor(y) + (u < y - floor(y)), or y rounded half to even; clamped to +-levels
//   u = uniform01(seed ^ hash_u32(i)), i = base + the element's flat index in x (lo ^ hash_u32(hi) of its halves)
//   back: code * scale
//
// Codes lie as x does, scales as [outer, inner]. Every maximum is exact in any order and every operation rounds by itself, so all
// devices give the same bytes. Two ways:
//   a row at once      quantize_rows, where inner = 1 and rows are many: a work-group of a GPU keeps a row in registers and reads it
//                      once, a work-item of a CPU takes a block of rows
//   by parts           absmax_rows or absmax_columns (inner > 1), absmax_scale, then scaled_rows, scaled_columns or scaled_transposed
//                      (codes as [inner, length], outer = 1)
// dequantize_rows and dequantize_columns go back. Launched by memtrain_cl/ops/stochastic.py.
// Constants: NAME (the one kernel to render), GPU or not, X (elements of x), CODES (int8, int16, or int4: two in a byte),
// STOCHASTIC or not, MULTIPLIED or not, SAVE (scales as bfloat16, rounded up; rows that are not finite reported), DEEP (GPU: items of a
// group that share a column), FUSED (GPU: fma is exact, also of subnormals, which llvmpipe's is not), PTX (the device takes inline PTX), FAR (of
// _fixed_codes.cl), WORDS
// (scaled_transposed on GPUs: words that columns of codes are whole numbers of, 0, 1 or 4), and those of _rows.cl.
#pragma OPENCL FP_CONTRACT OFF

<%
TYPES = (X, "float32")
VECTOR_WIDTHS = (1, 4) if GPU else (1, 8)
# Codes on GPUs in fixed point, as kernels/_fixed_codes.cl has them.
FIXED = GPU and (CODES == "int8" or CODES == "int4" and STOCHASTIC)
SCALE = "bfloat16" if SAVE else "float32"
SCALES = f"__global {'ushort' if SAVE else 'float'} *scale"
SOURCE = f"const __global {'half' if X == 'float16' else 'ushort' if X == 'bfloat16' else 'float'} *x, const ulong x0"
FACTORS = "const __global float *multiplier, " if MULTIPLIED else ""
FAULTS = ", const uint reports, volatile __global long *faults" if SAVE else ""
%>
#include "_types.cl"
#include "_rows.cl"
#include "_rng.cl"
#include "_codes.cl"
#include "_quantize.cl"
% if FIXED:
#include "_fixed_codes.cl"
% endif
% if SAVE:
#include "_faults.cl"
% endif

<%def name="put_scale(place, row)">
            ${store(SCALE, "scale", place, "own_scale")};
% if SAVE:
            if (reports && isnan(own_scale)) report(faults, ${FAULT_ROW}, (long)(${row}), 0);
% endif
</%def>
% if NAME == "absmax_scale":
// scale[q] from the largest of parts[q * apart + i * step], i < count; a work-item takes `per` q.
__kernel void absmax_scale(const __global uint *parts, ${SCALES}, const ulong columns, const uint count, const ulong apart,
                           const ulong step, const ulong per, const float levels${FAULTS}) {
    const ulong first = get_global_id(0) * per;
    const ulong last = min(first + per, columns);
    for (ulong q = first; q < last; q++) {
        uint most = 0;
        for (uint i = 0; i < count; i++) most = max(most, parts[q * apart + i * step]);
        const float own_scale = scale_of(most, levels);
        ${put_scale("q", "q")}
    }
}
% elif NAME == "pack_int4":
// packed [ceil(n/2)] = codes [n], two in a byte; a work-item takes `per` groups of eight codes.
__kernel void pack_int4(const __global char *codes, __global uchar *packed, const ulong n, const ulong per) {
    const ulong first = get_global_id(0) * per;
    for (ulong g = first; g < first + per && 8 * g < n; g++) {
        if (8 * g + 8 <= n) {
            vstore4(as_uchar4(draw_together(to_nibbles(as_ulong(vload8(g, codes))))), g, packed);
        } else {
            for (ulong i = 8 * g; i < n; i += 2) {
                const uint high = i + 1 < n ? (codes[i + 1] & 15) ^ 8 : 0;
                packed[i / 2] = (uchar)(((codes[i] & 15) ^ 8) | high << 4);
            }
        }
    }
}
% elif NAME == "unpack_int4":
// codes [n] of packed [ceil(n/2)]; a work-item takes `per` groups of eight codes.
__kernel void unpack_int4(const __global uchar *packed, __global char *codes, const ulong n, const ulong per) {
    const ulong first = get_global_id(0) * per;
    for (ulong g = first; g < first + per && 8 * g < n; g++) {
        if (8 * g + 8 <= n) {
            vstore8(as_char8(draw_apart(as_uint(vload4(g, packed)))) - (char8)(8), g, codes);
        } else {
            for (ulong i = 8 * g; i < n; i++) codes[i] = (char)((packed[i / 2] >> 4 * (i & 1) & 15) - 8);
        }
    }
}
% elif NAME.endswith("_rows"):
#include "_stochastic_rows.cl"
% else:
#include "_stochastic_columns.cl"
% endif
