// Blocks of ROT consecutive numbers rotated by the regular Hadamard matrix, and rotated rows in 8 bits.
//
// Formulas: _hadamard.cl, _moments.cl and memtrain_cl/reference/hadamard.py. x of float32, float16 or bfloat16, computed in float32.
//   rotate_blocks           y [n] float32 of x [n]
//   encode_rotated_rows     codes int8 [rows, n] and scale float32 [rows] of x [rows, n]; ROT divides n
//   decode_rotated_rows     y float32 [rows, n] of those
// rotate_blocks sees x as one row.
//
// A run is 16 consecutive elements of a row, its last one may be shorter. GPU: LANES work-items share a row, SLOTS rows a work-group; an item
// holds HELD runs, LANES apart, and reads them once, or, with HELD 0, once for the largest number and once more. In the kernels without a scale to
// find, LANES * SLOTS items take runs one after the other, whatever their row. CPU: an item takes `per` rows, or 256 elements of a row `per` times,
// and keeps a row up to HELD elements in local memory between its rotation and its codes; longer ones are rotated twice.
// Launched by memtrain_cl/ops/hadamard.py. Constants: NAME (the one kernel to render), GPU or not, X (elements of x), ROT, and those of _rows.cl.
#pragma OPENCL FP_CONTRACT OFF

<%
TYPES = (X, "float32")
PTX = 0
VECTOR_WIDTHS = (1, 4) if GPU else (1, 8)
SAVE, STOCHASTIC, CHANCE = 0, 0, 0
CODING, CODES = "linear", "int8"
MOST = "uint"
ITEMS = LANES * SLOTS
X_TYPE = stored(X)
%>
#include "_types.cl"
#include "_rows.cl"
#include "_rng.cl"
#include "_codes.cl"
#include "_quantize.cl"
#include "_exact.cl"
#include "_moments.cl"
#include "_hadamard.cl"
% if GPU:
#include "_lanes_max.cl"

% if NAME != "decode_rotated_rows":
inline void take_run(const __global ${X_TYPE} *x, uint left, float *own) {
    #pragma unroll
    for (uint k = 0; k < 16; k++) own[k] = 0.0f;
% for q in range(4):
    if (left > ${4 * q}) vstore4(load_left_${X}(x + ${4 * q}, left - ${4 * q}, 0.0f), 0, own + ${4 * q});
% endfor
}
% endif
% endif

% if NAME == "encode_rotated_rows":
__kernel __attribute__((reqd_work_group_size(${ITEMS}, 1, 1)))
void encode_rotated_rows(const __global ${X_TYPE} *x, __global char *codes, __global float *scale, const uint n, const ulong rows,
                         const uint per) {
% if GPU:
    __local float exchanged[HADAMARD_LOCAL];
    __local uint scratch[${SLOTS * (LANES + MOST_STAGE)}];
    const uint lid = get_local_id(0);
    const uint lane = lid % ${LANES};
    const uint slot = lid / ${LANES};
    const ulong row = (ulong)get_group_id(0) * ${SLOTS} + slot;
    const ulong at = row * n;
    // For the sake of the barriers no work-item leaves before them.
    const uint count = row < rows ? n : 0;
    uint4 most_4 = (uint4)(0);
% if HELD:
    float own[${16 * HELD}];
% for h in range(HELD):
    {
        const uint j = 16 * (lane + ${h * LANES});
        take_run(x + at + j, j < count ? min(count - j, 16u) : 0, own + ${16 * h});
        rotate_runs(own + ${16 * h}, exchanged, lid);
% for q in range(4):
        most_4 = max(most_4, magnitudes(vload4(0, own + ${16 * h + 4 * q})));
% endfor
    }
% endfor
% else:
    float own[16];
    for (uint i = 0; i < n; i += ${16 * LANES}) {
        const uint j = i + 16 * lane;
        take_run(x + at + j, j < count ? min(count - j, 16u) : 0, own);
        whole_rotation(own, exchanged, lid);
% for q in range(4):
        most_4 = max(most_4, magnitudes(vload4(0, own + ${4 * q})));
% endfor
    }
% endif
    const uint most = lanes_max(highest(most_4), scratch + slot * ${LANES + MOST_STAGE}, lane);
    const coder own_coder = coder_of(most);
    if (lane == 0 && count) scale[row] = own_coder.scale;
% if HELD:
% for h in range(HELD):
    {
        const uint j = 16 * (lane + ${h * LANES});
        const uint left = j < count ? count - j : 0;
% for q in range(4):
        if (left > ${4 * q}) put_whole(codes, at + j + ${4 * q}, left - ${4 * q}, encode_signed(vload4(0, own + ${16 * h + 4 * q}), own_coder, 0));
% endfor
    }
% endfor
% else:
    for (uint i = 0; i < n; i += ${16 * LANES}) {
        const uint j = i + 16 * lane;
        const uint left = j < count ? count - j : 0;
        take_run(x + at + j, min(left, 16u), own);
        rotate_runs(own, exchanged, lid);
% for q in range(4):
        if (left > ${4 * q}) put_whole(codes, at + j + ${4 * q}, left - ${4 * q}, encode_signed(vload4(0, own + ${4 * q}), own_coder, 0));
% endfor
    }
% endif
% else:
    __local float held[${max(HELD, 256)}];
    const ulong first = get_global_id(0) * (ulong)per;
    const ulong last = min(first + per, rows);
    for (ulong row = first; row < last; row++) {
        const ulong at = row * n;
        uint8 most_8 = (uint8)(0);
        for (uint j = 0; j < n; j += 256) {
            __local float *block = held${" + j" if HELD else ""};
            const uint count = min(n - j, 256u);
            for (uint i = 0; i < (count + 15) / 16 * 16; i += 8) {
                vstore8(i < count ? load_left_${X}(x + at + j + i, count - i, 0.0f) : (vec)(0.0f), 0, block + i);
            }
            rotate_block(block, count);
            for (uint i = 0; i < count; i += 8) most_8 = max(most_8, magnitudes(vload8(0, block + i)));
        }
        const coder own_coder = coder_of(highest(most_8));
        scale[row] = own_coder.scale;
        for (uint j = 0; j < n; j += 256) {
            __local float *block = held${" + j" if HELD else ""};
            const uint count = min(n - j, 256u);
% if not HELD:
            for (uint i = 0; i < (count + 15) / 16 * 16; i += 8) {
                vstore8(i < count ? load_left_${X}(x + at + j + i, count - i, 0.0f) : (vec)(0.0f), 0, block + i);
            }
            rotate_block(block, count);
% endif
            for (uint i = 0; i < count; i += 8) {
                put_whole(codes, at + j + i, count - i, encode_signed(vload8(0, block + i), own_coder, 0));
            }
        }
    }
% endif
}
% else:
<%
DECODES = NAME == "decode_rotated_rows"
HADAMARD_KERNEL = NAME
SOURCE = "const __global char *codes, const __global float *scale" if DECODES else f"const __global {X_TYPE} *x"
%>
// `splits` runs, or blocks of 256 elements of a CPU's item, are a row.
__kernel __attribute__((reqd_work_group_size(${ITEMS}, 1, 1)))
void ${HADAMARD_KERNEL}(${SOURCE}, __global float *y, const ulong n, const ulong splits, const ulong parts, const uint per) {
% if GPU:
    __local float exchanged[HADAMARD_LOCAL];
    const ulong part = get_global_id(0);
    const ulong row = part / splits;
    const ulong j = 16 * (part - row * splits);
    const uint left = part < parts ? (uint)min(n - j, (ulong)16) : 0;
    const ulong at = row * n + j;
    float own[16];
% if DECODES:
    const float own_scale = left ? scale[row] : 0.0f;
    #pragma unroll
    for (uint k = 0; k < 16; k++) own[k] = 0.0f;
% for q in range(4):
    if (left > ${4 * q}) vstore4(take_codes(codes, at + ${4 * q}, left - ${4 * q}) * own_scale, 0, own + ${4 * q});
% endfor
% else:
    take_run(x + at, left, own);
% endif
    rotate_runs(own, exchanged, get_local_id(0));
% for q in range(4):
    if (left > ${4 * q}) store_left_float32(y + at + ${4 * q}, left - ${4 * q}, vload4(0, own + ${4 * q}));
% endfor
% else:
    __local float block[256];
    const ulong first = get_global_id(0) * (ulong)per;
    const ulong last = min(first + per, parts);
    for (ulong part = first; part < last; part++) {
        const ulong row = part / splits;
        const ulong j = 256 * (part - row * splits);
        const uint count = (uint)min(n - j, (ulong)256);
        const ulong at = row * n + j;
        for (uint i = 0; i < (count + 15) / 16 * 16; i += 8) {
% if DECODES:
            vstore8(i < count ? take_codes(codes, at + i, count - i) * scale[row] : (vec)(0.0f), 0, block + i);
% else:
            vstore8(i < count ? load_left_${X}(x + at + i, count - i, 0.0f) : (vec)(0.0f), 0, block + i);
% endif
        }
        rotate_block(block, count);
        for (uint i = 0; i < count; i += 8) store_left_float32(y + at + i, count - i, vload8(0, block + i));
    }
% endif
}
% endif
