// Matrix products with float32 accumulation whose right operand may be a packed counter weight, decoded on the way in.
//
//   out[z, m, n] = sum_k a[z, m, k] * b[z, k, n]             float32, float16 or bfloat16; out is dense, of rows of N
//   LEFT   "rows": a[m*lda + k]        "columns": a[k*lda + m]
//   RIGHT  "dense": b[k*ldb + n]       "dense_t": b[n*ldb + k]
//          "panels" and TILED: packed operands, see _matmul_cpu.cl (where LEFT "" or RIGHT "" renders what packs the other)
//          "counter": scale[k] * t[k, n]  (state row k)       "counter_t": scale[n] * t[n, k]  (state row n)
//          "cached" and "cached_t": the same with t at hand, RIGHT_TYPE int8 or float16, in place of the state
//
//   forward      a = x, rows               b = counter_t or weight, dense_t       out [M, out]
//   grad_input   a = grad_out, rows        b = counter or weight, dense           out [M, in]
//   grad_weight  a = grad_out, columns     b = x, dense                           out [R, in]
//
// EPILOGUE (dense): out = alpha * (a @ b) + beta * add, where add[z*add_z + m*add_m + n*add_n] is not read when beta is 0.
// The third dimension of the launch counts z * splits + split: each split of K makes a result of its own (out_z apart), which
// kernels/matvec.cl sums in their order. Every operand begins left0, right0, out0, add0 elements into its buffer.
//
// GATE: the kernels do nothing while gate[2], whether a layer's clock fires, is 0.
//
// No dense weight exists beside a counter layer: a tile of it at most, in local memory. Launched by memtrain_cl/launchers/matmul.py.
// Constants: CORES, not "": 16-bit operands on tensor cores (_matmul_cores.cl); GPU (work-groups with tiles of both operands in local
// memory) or not (a work-item with a register tile beside panels); LEFT, RIGHT, the three element types, C, PACKED, ALIGNED (rows of a and
// dense b begin on four whole elements), EPILOGUE, GATE, and the shape's own, below.
<% VECTOR_WIDTHS = (1, 4) if GPU else (1, 4, 8) %>
#include "_types.cl"
#include "_code6.cl"
#include "_counter_state.cl"
#include "_transpose.cl"

<%
CACHED = RIGHT in ("cached", "cached_t")
DENSE = RIGHT not in ("counter", "counter_t") and not CACHED
# Rows of the right operand are the columns of the product, or its rows.
BY_COLUMN = RIGHT in ("counter_t", "cached_t", "dense_t")
RIGHT_STORED = "uchar" if RIGHT in ("counter", "counter_t") else stored(RIGHT_TYPE)
# What a row of n weights takes, in elements of the right operand.
ROW = "n" if CACHED else ROW_BYTES[PACKED]
# A name for the vector types and built-ins of a width.
def wide(name, width):
    return name if width == 1 else f"{name}{width}"
%>
<%def name="loaders(name, t, aligned)">
% for W in VECTOR_WIDTHS:
inline ${wide("float", W)} ${name}_${W}(const __global ${stored(t)} *p, const size_t i) {
% if W == 1:
    return ${load(t, "p", "i")};
% elif t == "float16":
    return ${f"vloada_half{W}" if aligned else f"vload_half{W}"}(0, p + i);
% elif t == "bfloat16":
    return as_float${W}(convert_uint${W}(${f"*(const __global ushort{W} *)(p + i)" if aligned else f"vload{W}(0, p + i)"}) << 16);
% else:
    return ${f"*(const __global float{W} *)(p + i)" if aligned else f"vload{W}(0, p + i)"};
% endif
}
% endfor
</%def>
% if LEFT:
${loaders("left", LEFT_TYPE, GPU and ALIGNED)}
% endif
% if DENSE and RIGHT:
${loaders("right", RIGHT_TYPE, GPU and ALIGNED)}
% endif
% if CACHED:
% for W in VECTOR_WIDTHS:
// Weights j .. j + ${W - 1} of a row of the cache.
inline ${wide("float", W)} cached_${W}(const __global ${RIGHT_STORED} *row, const size_t j) {
% if RIGHT_TYPE == "float16":
    return ${"vload_half(j, row)" if W == 1 else f"vload_half{W}(0, row + j)"};
% else:
    return ${"row[j]" if W == 1 else f"convert_float{W}(vload{W}(0, row + j))"};
% endif
}
% endfor
% endif
% if EPILOGUE:
${loaders("add", OUT_TYPE, False)}
% endif
% for W in VECTOR_WIDTHS:
inline void out_store_${W}(const ${wide("float", W)} value, __global ${stored(OUT_TYPE)} *p, const size_t i) {
% if W == 1:
    ${store(OUT_TYPE, "p", "i", "value")};
% elif OUT_TYPE == "float16":
    vstore_half${W}_rte(value, 0, p + i);
% elif OUT_TYPE == "bfloat16":
    vstore${W}((ushort${W})(${", ".join(f"bfloat16_store(value.s{e})" for e in range(W))}), 0, p + i);
% else:
    vstore${W}(value, 0, p + i);
% endif
}
% endfor

<%def name="parameters()">
const __global ${stored(LEFT_TYPE)} *left, const __global ${RIGHT_STORED} *right,
% if not DENSE:
            const __global float *scale,
% endif
            __global ${stored(OUT_TYPE)} *out,
% if EPILOGUE:
            const __global ${stored(OUT_TYPE)} *add, const ulong add0, const ulong add_z, const ulong add_m, const ulong add_n,
            const float alpha, const float beta,
% endif
% if GATE:
            const __global long *gate,
% endif
            const ulong left0, const ulong right0, const ulong out0, const ulong left_z, const ulong right_z, const ulong out_z,
            const uint ${"all_rows" if GATE else "M"}, const uint N, const uint K, const uint lda, const uint ldb, const uint m_per, const uint n_per,
            const uint k_per, const uint splits</%def>
// This item's matrices and its part of K.
<%def name="begin()">
% if GATE:
    // Nothing of no rows. (A return before barriers is more than some compilers can do.)
    const uint M = gate[2] == 0 ? 0 : all_rows;
% endif
    const uint z = get_global_id(2) / splits;
    const uint k_first = (get_global_id(2) - z * splits) * k_per;
    const uint k_last = ${"M == 0 ? k_first : min(k_first + k_per, K)" if GATE else "min(k_first + k_per, K)"};
    left += left0 + z * left_z;
    right += right0 + z * right_z;
    out += out0 + get_global_id(2) * out_z;
% if EPILOGUE:
    add += add0 + z * add_z;
% endif
</%def>
% if CORES:
#include "_matmul_cores.cl"
% elif GPU:
#include "_matmul_gpu.cl"
% else:
#include "_matmul_cpu.cl"
% endif
