// Numbers in 8 bits, a scale a block of consecutive elements, and the way back.
//
// x [n] of float32, float16 or bfloat16, computed in float32, in blocks of `size` elements, the last one shorter. Formulas: _moments.cl and
// memtrain_cl/reference/blockwise.py. codes [n] int8 (linear) or uint8 (dynamic), scales [ceil(n / size)] float32.
//
// GPU: LANES work-items share a block, SLOTS blocks a work-group; they keep it in registers and read it once, or, with HELD 0, read it once
// for its largest number and once more. CPU: a work-item takes `per` blocks. Launched by memtrain_cl/ops/blockwise.py.
// Constants: NAME (the one kernel to render), GPU or not, X (elements of x), CODING (linear or dynamic), CODES (int8 or uint8), KIND (signed or
// unsigned, the dynamic map), STOCHASTIC or not, PTX (_exact.cl), and those of _rows.cl.
#pragma OPENCL FP_CONTRACT OFF

<%
TYPES = (X, "float32")
VECTOR_WIDTHS = (1, 4) if GPU else (1, 8)
SAVE, CHANCE = 0, STOCHASTIC
MOST = "uint"
%>
#include "_types.cl"
#include "_rows.cl"
#include "_rng.cl"
#include "_codes.cl"
#include "_quantize.cl"
#include "_exact.cl"
#include "_moments.cl"
% if PTX:
#include "_warps_max.cl"
% elif GPU:
#include "_lanes_max.cl"
% endif

<%
TAKEN = "taken_word(codes, at + j, count - j, 0)" if PTX else "codes, at + j, count - j"
DECODED = f"decode_{KIND}({TAKEN}{OF_MAP})"
CODE_TYPE = "char" if CODING == "linear" else "uchar"
X_TYPE = stored(X)
SIZES = "const ulong n, const uint size, const ulong blocks, const uint per"
CHARTED = ", const __global float *chart" if CODING == "dynamic" else ""
SEEDED = ", const uint seed" if CHANCE else ""
OF_UNIFORM = f", uniform_of_{WIDTH}(heads_at(at + J), seed ^ seed >> 16)" if CHANCE else ""

def coded(v, j):
    return f"encode_{KIND}({v}, own, positive{OF_MAP}{OF_UNIFORM.replace('J', j)})"
%>
<%def name="map_known()">
% if CODING == "dynamic" and GPU:
    __local float map[MAP_SIZE];
    for (uint i = get_local_id(0); i < MAP_SIZE; i += ${LANES * SLOTS}) map[i] = chart[i];
    barrier(CLK_LOCAL_MEM_FENCE);
% elif CODING == "dynamic":
    const __global float *map = chart;
% endif
</%def>
<%def name="blocks_begin()">
% if GPU:
    const uint lane = get_local_id(0)${f" % {LANES}" if SLOTS > 1 else ""};
    const uint slot = ${f"get_local_id(0) / {LANES}" if SLOTS > 1 else "0"};
% if CODING == "dynamic" and not PTX:
    for (uint turn = 0; turn < per; turn++) {
% else:
    const uint turn = 0;
    {
% endif
        const ulong block = ((ulong)turn * get_num_groups(0) + get_group_id(0)) * ${SLOTS} + slot;
        const ulong at = block * size;
        // For the sake of the barriers no work-item leaves before them.
        const uint count = block < blocks ? (uint)min((ulong)size, n - at) : 0;
        const uint units = (count + 3) / 4;
% else:
    const ulong first = get_global_id(0) * (ulong)per;
    const ulong last = min(first + per, blocks);
    for (ulong block = first; block < last; block++) {
        const ulong at = block * size;
        const uint count = (uint)min((ulong)size, n - at);
% endif
</%def>
% if NAME == "quantize_blocks":
__kernel __attribute__((reqd_work_group_size(${LANES * SLOTS}, 1, 1)))
void quantize_blocks(const __global ${X_TYPE} *x, __global ${CODE_TYPE} *codes, __global float *scales${CHARTED}, ${SIZES},
                     const uint positive${SEEDED}) {
% if GPU:
    __local uint scratch[${SLOTS * (LANES + MOST_STAGE)}];
% endif
    ${map_known()}
    ${blocks_begin()}
% if GPU:
        uint4 most_4 = (uint4)(0);
% if HELD:
        vec held[${HELD}];
        // Without conditions, so that all of a block is asked for before any of it is awaited.
        if (count == ${4 * LANES * HELD}) {
            #pragma unroll
            for (uint k = 0; k < ${HELD}; k++) held[k] = load_${X}(x + at + 4 * (lane + k * ${LANES}));
        } else {
            #pragma unroll
            for (uint k = 0; k < ${HELD}; k++) {
                const uint j = 4 * (lane + k * ${LANES});
                held[k] = (vec)(0.0f);
                if (j < count) held[k] = load_left_${X}(x + at + j, count - j, 0.0f);
            }
        }
        #pragma unroll
        for (uint k = 0; k < ${HELD}; k++) most_4 = max(most_4, magnitudes(held[k]));
% else:
        for (uint j = 4 * lane; j < count; j += ${4 * LANES}) {
            most_4 = max(most_4, magnitudes(load_left_${X}(x + at + j, count - j, 0.0f)));
        }
% endif
        const uint most = lanes_max(highest(most_4), scratch + slot * ${LANES + MOST_STAGE}, lane);
        const coder own = coder_of(most);
        if (lane == 0 && units) scales[block] = own.scale;
% else:
        // Two, because each waits for the one before it.
        uint8 most_a = (uint8)(0), most_b = (uint8)(0);
        uint i = 0;
        for (; count - i >= 16; i += 16) {
            most_a = max(most_a, magnitudes(load_${X}(x + at + i)));
            most_b = max(most_b, magnitudes(load_${X}(x + at + i + 8)));
        }
        for (; i < count; i += 8) most_a = max(most_a, magnitudes(load_left_${X}(x + at + i, count - i, 0.0f)));
        const uint most = highest(max(most_a, most_b));
        const coder own = coder_of(most);
        scales[block] = own.scale;
% endif
% if GPU and HELD:
        #pragma unroll
        for (uint k = 0; k < ${HELD}; k++) {
            const uint j = 4 * (lane + k * ${LANES});
            if (lane + k * ${LANES} < units) put_whole(codes, at + j, count - j, ${coded("held[k]", "j")});
        }
% elif GPU:
        for (uint j = 4 * lane; j < count; j += ${4 * LANES}) {
            const vec v = load_left_${X}(x + at + j, count - j, 0.0f);
            put_whole(codes, at + j, count - j, ${coded("v", "j")});
        }
% elif not CHANCE:
        // Guessed first, and encoded where one of the guesses may be wrong.
        uint j = 0;
        while (j < count / 8 * 8) {
            const uint next = min(j + GUESSED, count / 8 * 8);
            int8 close = never_guess(own);
            for (i = j; i < next; i += 8) put_whole(codes, at + i, 8, guess_${KIND}(load_${X}(x + at + i), own, positive, &close));
            if (any(close)) {
                for (i = j; i < next; i += 8) put_whole(codes, at + i, 8, ${coded(f"load_{X}(x + at + i)", "i")});
            }
            j = next;
        }
        if (j < count) put_whole(codes, at + j, count - j, ${coded(f"load_left_{X}(x + at + j, count - j, 0.0f)", "j")});
% else:
        for (uint j = 0; j < count; j += 8) {
            const vec v = load_left_${X}(x + at + j, count - j, 0.0f);
            put_whole(codes, at + j, count - j, ${coded("v", "j")});
        }
% endif
    }
}
% else:
__kernel __attribute__((reqd_work_group_size(${LANES * SLOTS}, 1, 1)))
void dequantize_blocks(const __global ${CODE_TYPE} *codes, const __global float *scales, __global float *x${CHARTED}, ${SIZES}) {
    ${map_known()}
    ${blocks_begin()}
% if GPU:
        const float scale = units ? scales[block] : 0.0f;
        for (uint j = 4 * lane; j < count; j += ${4 * LANES}) {
% else:
        const float scale = scales[block];
        for (uint j = 0; j < count; j += 8) {
% endif
            store_left_float32(x + at + j, count - j, ${DECODED} * scale);
        }
    }
}
% endif
