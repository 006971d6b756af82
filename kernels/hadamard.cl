// Blocks of ROT consecutive numbers rotated by the regular Hadamard matrix, and rotated rows in 8 bits.
//
// Formulas: _hadamard.cl, _moments.cl and memtrain_cl/reference/hadamard.py. x of float32, float16 or bfloat16, computed in float32.
//   rotate_blocks           y [n] float32 of x [n]
//   encode_rotated_rows     codes int8 [rows, n] and scale float32 [rows] of x [rows, n]; ROT divides n
//   decode_rotated_rows     y float32 [rows, n] of those
// rotate_blocks sees x as one row.
//
// A block is 256 consecutive elements of a row, its last one may be shorter. GPU: sixteen items take a block, as rotate_spread says. LANES
// items share a row, SLOTS rows a work-group; an item holds its part of HELD blocks and reads them once, or, with HELD 0, once for the largest
// number and once more. In the kernels without a scale to find, items take blocks whatever their row. CPU: an item takes `per` rows, or
// a block `per` times, and keeps a row up to HELD elements in local memory between its rotation and its codes; longer ones are rotated twice.
// Launched by memtrain_cl/ops/hadamard.py. Constants: NAME (the one kernel to render), GPU or not, X (elements of x), ROT, PTX (of _exact.cl),
// and those of _rows.cl.
#pragma OPENCL FP_CONTRACT OFF

<%
TYPES = (X, "float32")
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
% if PTX:
#include "_warps_max.cl"
% else:
#include "_lanes_max.cl"
% endif

% if NAME != "decode_rotated_rows":
// An item's part of the block at x, of which `left` elements are there from that part on.
inline void take_spread(const __global ${X_TYPE} *x, uint left, float *own) {
% for m in range(4):
    vstore4(left > ${64 * m} ? load_left_${X}(x + ${64 * m}, left - ${64 * m}, 0.0f) : (float4)(0.0f), ${m}, own);
% endfor
}
% endif
% endif

% if NAME == "encode_rotated_rows":
__kernel __attribute__((reqd_work_group_size(${ITEMS}, 1, 1)))
void encode_rotated_rows(const __global ${X_TYPE} *x, __global char *codes, __global float *scale, const uint n, const ulong rows,
                         const uint per) {
% if GPU:
    __local float exchanged[SPREAD] __attribute__((aligned(16)));
    __local uint scratch[${SLOTS * (LANES + MOST_STAGE)}];
    const uint lid = get_local_id(0);
    const uint lane = lid % ${LANES};
    const uint slot = lid / ${LANES};
    const ulong row = (ulong)get_group_id(0) * ${SLOTS} + slot;
    // For the sake of the barriers no work-item leaves before them.
    const uint count = row < rows ? n : 0;
    // Of the item's part of its first block.
    const uint first = 256 * (lane / 16) + 4 * (lane % 16);
    const __global ${X_TYPE} *source = x + row * n;
    __global char *target = codes + row * n;
    uint4 most_4 = (uint4)(0);
% if HELD:
    float own[${16 * HELD}];
% for h in range(HELD):
    {
        const uint j = first + ${16 * LANES * h};
        take_spread(source + j, j < count ? count - j : 0, own + ${16 * h});
    }
% endfor
% for h in range(HELD):
    rotate_spread(own + ${16 * h}, exchanged, lid);
% for m in range(4):
    most_4 = max(most_4, magnitudes(vload4(${m}, own + ${16 * h})));
% endfor
% endfor
% else:
    float own[16];
    for (uint i = 0; i < n; i += ${16 * LANES}) {
        const uint j = first + i;
        take_spread(source + j, j < count ? count - j : 0, own);
        rotate_spread(own, exchanged, lid);
% for m in range(4):
        most_4 = max(most_4, magnitudes(vload4(${m}, own)));
% endfor
    }
% endif
    const uint most = lanes_max(highest(most_4), scratch + slot * ${LANES + MOST_STAGE}, lane);
    const coder own_coder = coder_of(most);
    if (lane == 0 && count) scale[row] = own_coder.scale;
<%def name="put_spread(own)">
        const uint left = j < count ? count - j : 0;
% for m in range(4):
        if (left > ${64 * m}) put_whole(target, j + ${64 * m}, left - ${64 * m}, encode_signed(vload4(${m}, ${own}), own_coder, 0));
% endfor
</%def>
% if HELD:
% for h in range(HELD):
    {
        const uint j = first + ${16 * LANES * h};
        ${put_spread(f"own + {16 * h}")}
    }
% endfor
% else:
    for (uint i = 0; i < n; i += ${16 * LANES}) {
        const uint j = first + i;
        take_spread(source + j, j < count ? count - j : 0, own);
        rotate_spread(own, exchanged, lid);
        ${put_spread("own")}
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
// `splits` blocks are a row; `parts` counts them all.
__kernel __attribute__((reqd_work_group_size(${ITEMS}, 1, 1)))
void ${HADAMARD_KERNEL}(${SOURCE}, __global float *y, const ulong n, const ulong splits, const ulong parts, const uint per) {
% if GPU:
    __local float exchanged[SPREAD] __attribute__((aligned(16)));
    const ulong part = get_global_id(0) / 16;
    // No device holds 2^32 blocks.
    const ulong row = ${"(uint)part / (uint)splits" if DECODES else "0"};
    const ulong j = 256 * (part - row * splits) + 4 * (get_local_id(0) % 16);
    const uint left = part < parts && j < n ? (uint)min(n - j, (ulong)256) : 0;
    const ulong at = row * n + j;
    float own[16];
% if DECODES:
    const float own_scale = left ? scale[row] : 0.0f;
% for m in range(4):
    vstore4(left > ${64 * m} ? take_codes(codes + at, ${64 * m}, left - ${64 * m}) * own_scale : (float4)(0.0f), ${m}, own);
% endfor
% else:
    take_spread(x + at, left, own);
% endif
    rotate_spread(own, exchanged, get_local_id(0));
% for m in range(4):
    if (left > ${64 * m}) store_left_float32(y + at + ${64 * m}, left - ${64 * m}, vload4(${m}, own));
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
