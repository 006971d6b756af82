// A step of Automagic on rotated int8 state. memtrain_cl/reference/automagic.py states the rule and the order of its sums.
//
// A tensor: param [n] of PARAM; grad [n] of GRAD; held, v float32 [n], or (ROWS) int8 codes of sqrt(v) in rotated rows [rows, columns] with scale float32
// [rows]; signs [PLANES, n] bytes, rings of the last signs; skipped [1]. Its n elements are `chunks` chunks of CHUNK.
//   automagic_measure    the chunks' sums of squared updates; (ROWS) the scales put aside to `old`, and `most`, the bits of each row's largest rotated
//                        number; elements of gradients that are not finite are counted
//   automagic_sum        where there are several chunks, the sum over their sums, behind them
//   automagic_apply      the step: weights, signs, state; votes [2] a chunk, from pair `first` on
//   automagic_tally      the sum over the chunks' votes, pair `place` of the tally (a tensor of one chunk has it from automagic_apply)
//   automagic_rate       the votes of all tensors applied to the learning rate, and the tally made zero
//   add_rounded          total += grad, rounded stochastically
// What automagic_measure found of an element, automagic_apply finds again: reading a gradient and codes twice is less than writing and reading updates,
// and takes no memory. `most` is zero before, unless the tensor is one chunk, which makes it so itself.
// GPU: a work-group of SIDE items takes a chunk; CPU: an item takes `per` chunks (_automagic_chunks.cl).
// Launched by memtrain_cl/ops/automagic.py. Constants: NAME (the one kernel to render), GPU or not, PARAM and GRAD (elements), ROWS or not, ROT (1 without
// rows), PLANES, STOCHASTIC (weights of 16 bits), CHUNK, SIDE, PTX (_exact.cl), and those of _rows.cl.
#pragma OPENCL FP_CONTRACT OFF

<%
TYPES = (PARAM, GRAD, "float32")
VECTOR_WIDTHS = (1, 4) if GPU else (1, 8)
SAVE, CHANCE = 0, 0
CODING, CODES = "linear", "int8"
ITEMS = LANES
%>
#include "_types.cl"
#include "_reduce.cl"
#include "_rows.cl"
#include "_rng.cl"
#include "_codes.cl"
#include "_quantize.cl"
#include "_exact.cl"
#include "_moments.cl"
#include "_hadamard.cl"
#include "_written.cl"
#include "_automagic_chunks.cl"
<%
VECS = 16 // WIDTH
STEPS = NAME in ("automagic_measure", "automagic_apply")
HELD_TYPE = "char" if ROWS else "float"
SIZES = "const ulong n, const uint columns, const ulong rows, const ulong chunks, const uint per"
RULE = "const float beta2, const float rest2, const float lift, const float eps"
%>
% if STEPS:
// g, 0 where it is not finite; v from what is held, and its root; the update before it is bounded.
typedef struct {
    vec g, v, root, u;
} moments;

% if PTX:
// A number at a time: vectors of conditions take three instructions more each.
inline vec counted(vec g) {
% for i in "xyzw":
    if (!(fabs(g.${i}) <= 0x1p63f)) g.${i} = 0.0f;
% endfor
    return g;
}

% endif
inline moments updated(vec g, vec held, float beta2, float rest2, float lift, float eps) {
    moments own;
    own.g = ${"counted(g)" if PTX else "select((vec)(0.0f), g, magnitudes(g) <= GRADIENT_MAX)"};
% if ROWS:
    held = max(held, 0.0f);
    held = held * held;
% endif
    own.v = beta2 * held + rest2 * (own.g * own.g);
    ${root_and_quotient("own.v", "own.g", "root * lift + eps", "root * lift + eps", "fmax(0x1p-120f, 0x1p-98f / eps)")}
    own.root = root;
    own.u = q;
    return own;
}

<%def name="local_memory()">
% if GPU:
    const uint lid = get_local_id(0);
% if ROWS:
    __local float exchanged[HADAMARD_LOCAL] __attribute__((aligned(16)));
% endif
% else:
    __local float block[256];
% endif
</%def>
<%def name="rows_of_chunk()">
        // Rows that begin in this chunk.
        const ulong first_row = column0 ? row0 + 1 : row0;
        const ulong last_row = (begin + count + columns - 1) / columns;
        for (ulong row = first_row + ${"lid" if GPU else "0"}; row < last_row; row += ${ITEMS}) {
            ${caller.body()}
        }
</%def>
% endif
% if NAME == "automagic_measure":
% if ROWS:
#define NEAR_ROWS 520

% if GPU:
// The largest number of a row, `down` below the chunk's first: of the first ones in local memory.
inline void note(volatile __local uint *near, volatile __global uint *most, ulong row0, uint down, uint bits) {
    if (down < NEAR_ROWS) {
        atomic_max(near + down, bits);
    } else {
        atomic_max(most + row0 + down, bits);
    }
}
% else:
inline void note(volatile __global uint *most, ulong row0, uint down, uint bits) { atomic_max(most + row0 + down, bits); }
% endif
<% NOTE = "note(near_rows, most, row0, " if GPU else "note(most, row0, " %>
% endif
__kernel __attribute__((reqd_work_group_size(${ITEMS}, 1, 1)))
void automagic_measure(const __global ${stored(GRAD)} *grad, const __global ${HELD_TYPE} *held, const __global float *held_scale, __global float *old,
                       volatile __global uint *most, __global float *sums, volatile __global int *skipped, ${SIZES}, ${RULE}) {
    ${local_memory()}
% if ROWS and GPU:
    volatile __local uint near_rows[NEAR_ROWS];
    for (uint i = lid; i < NEAR_ROWS; i += ${ITEMS}) near_rows[i] = 0;
% endif
% if ROWS:
    if (chunks == 1) {
        for (ulong row = ${"lid" if GPU else "0"}; row < rows; row += ${ITEMS}) most[row] = 0;
    }
% endif
% if GPU:
    __local float4 lanes[${SIDE}];
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
% else:
    __local float lanes[LANE_COUNT];
% endif
    <%call expr="each_chunk()">
% if ROWS:
        <%call expr="rows_of_chunk()">
            old[row] = held_scale[row];
        </%call>
        uint${WIDTH} own_most = (uint${WIDTH})(0);
% endif
% if GPU:
        float4 sum = (float4)(0.0f);
% else:
        for (uint i = 0; i < LANE_COUNT; i += 8) vstore8((vec)(0.0f), 0, lanes + i);
% endif
        <%call expr="each_run()">
            <%def name="taken(whole)">
% for q in range(VECS):
                vec raw${q} = (vec)(0.0f);
                if (left > ${WIDTH * q}) {
                    raw${q} = load_left_${GRAD}(grad + at + ${WIDTH * q}, left - ${WIDTH * q}, 0.0f);
                }
% endfor
            </%def>
            <%def name="elements(whole)">
% for q in range(VECS):
                vec square${q} = (vec)(0.0f);
                if (left > ${WIDTH * q}) {
                    const vec raw = raw${q};
                    const moments found = updated(raw, vload${WIDTH}(0, own + ${WIDTH * q}), beta2, rest2, lift, eps);
                    square${q} = found.u * found.u;
                    vstore${WIDTH}(found.root, 0, own + ${WIDTH * q});
                    if (${" || ".join(f"!(fabs(raw.{i}) <= 0x1p63f)" for i in "xyzw") if PTX else "any(magnitudes(raw) > GRADIENT_MAX)"}) {
                        uint bits[${WIDTH}];
                        vstore${WIDTH}(magnitudes(raw), 0, bits);
                        int times = 0;
                        for (uint i = 0; i < ${WIDTH}; i++) times += bits[i] > GRADIENT_MAX;
                        atomic_add(skipped, times);
                    }
                }
% endfor
                const float4 quarter = quarter_run(${", ".join(f"square{q}" for q in range(VECS))});
% if GPU:
                sum += quarter;
% else:
                add_run(lanes, j, quarter);
% endif
            </%def>
            <%def name="next_row()">
                    ${NOTE}own_row, highest(own_most));
                    own_most = (uint${WIDTH})(0);
            </%def>
            <%def name="rotated(whole)">
% if ROT >= 16:
% for q in range(VECS):
                own_most = max(own_most, magnitudes(vload${WIDTH}(0, own + ${WIDTH * q})));
% endfor
% else:
                // Rows may end anywhere.
                for (uint i = 0; i < min(left, 16u); i++) {
                    const uint down = (column0 + j + i) / columns;
                    if (down != own_row) {
                        ${NOTE}own_row, own_most.s0);
                        own_row = down;
                        own_most = (uint${WIDTH})(0);
                    }
                    own_most = max(own_most, (uint${WIDTH})(as_uint(own[i])));
                }
% endif
            </%def>
        </%call>
% if ROWS:
        ${NOTE}own_row, highest(own_most));
% endif
% if GPU:
        const float chunk_sum = halve_chunk(lanes, sum, lid);
        if (lid == 0) sums[chunk] = chunk_sum;
% if ROWS:
        const uint down_to = min((column0 + count - 1) / columns + 1, (uint)NEAR_ROWS);
        for (uint i = lid; i < down_to; i += ${ITEMS}) {
            atomic_max(most + row0 + i, near_rows[i]);
            near_rows[i] = 0;
        }
% endif
        barrier(CLK_LOCAL_MEM_FENCE);
% else:
        sums[chunk] = halve_chunk(lanes);
% endif
    </%call>
}
% elif NAME == "automagic_apply":
#include "_automagic_signs.cl"

<% RINGS = PTX and ALIGNED and PLANES == 1 %>
__kernel __attribute__((reqd_work_group_size(${ITEMS}, 1, 1)))
void automagic_apply(const __global ${stored(GRAD)} *grad, __global ${HELD_TYPE} *held, const __global float *held_scale, __global float *scale,
                     const __global float *most, const __global float *sums, __global ${stored(PARAM)} *param, __global uchar *signs,
                     const __global float *lr, __global float *votes, const ulong first, ${SIZES}, ${RULE}, const float clip, const float decay,
                     const float size_of_all, const uint slot, const uint history, const uint full, const uint seed) {
    ${local_memory()}
    const float sum_of_squares = sums[chunks > 1 ? chunks : 0];
    const float share = 1.0f / max(sqrt(sum_of_squares / size_of_all) / clip, 1.0f);
    const float rate = *lr;
% if GPU:
    __local float4 lanes[${SIDE}];
% else:
    __local float net_lanes[LANE_COUNT], weight_lanes[LANE_COUNT];
% endif
    <%call expr="each_chunk()">
% if ROWS:
        <%call expr="rows_of_chunk()">
            scale[row] = coder_of(as_uint(most[row])).scale;
        </%call>
% endif
% if ROT >= 16:
        coder row_coder = coder_of(as_uint(most[row0]));
% endif
% if GPU:
        float4 net_sum = (float4)(0.0f), weight_sum = (float4)(0.0f);
% else:
        for (uint i = 0; i < LANE_COUNT; i += 8) {
            vstore8((vec)(0.0f), 0, net_lanes + i);
            vstore8((vec)(0.0f), 0, weight_lanes + i);
        }
% endif
        <%call expr="each_run()">
            <%def name="taken(whole)">
% for q in range(VECS):
                vec raw${q} = (vec)(0.0f), p${q} = (vec)(0.0f);
                if (left > ${WIDTH * q}) {
                    raw${q} = load_left_${GRAD}(grad + at + ${WIDTH * q}, left - ${WIDTH * q}, 0.0f);
                    p${q} = load_left_${PARAM}(param + at + ${WIDTH * q}, left - ${WIDTH * q}, 0.0f);
                }
% endfor
% if RINGS and whole:
                uint4 rings = *(const __global uint4 *)(signs + at);
% endif
            </%def>
            <%def name="elements(whole)">
% for q in range(VECS):
                vec net${q} = (vec)(0.0f), weight${q} = (vec)(0.0f);
                if (left > ${WIDTH * q}) {
                    const uint own_left = left - ${WIDTH * q};
                    const ulong here = at + ${WIDTH * q};
                    const moments found = updated(raw${q}, vload${WIDTH}(0, own + ${WIDTH * q}), beta2, rest2, lift, eps);
                    const vec u = clamp(found.u * share, -clip, clip);
                    const vec w = full ? fabs(u) : (vec)(0.0f);
                    const vec p = p${q};
                    const vec moved = p - rate * (u + decay * p);
% if STOCHASTIC:
                    const vec chance = uniform_of_${WIDTH}(heads_at(here), seed ^ seed >> 16);
                    store_left_${PARAM}(param + here, own_left, written(moved, chance));
% else:
                    store_left_${PARAM}(param + here, own_left, moved);
% endif
% if RINGS and whole:
                    uint ring = rings.s${q};
                    net${q} = voted_word(&ring, found.g, w, slot, history, full);
                    rings.s${q} = ring;
% else:
                    net${q} = voted(signs + here, n, own_left, found.g, w, slot, history, full);
% endif
                    weight${q} = w;
% if ROWS:
                    vstore${WIDTH}(found.root, 0, own + ${WIDTH * q});
% else:
                    store_left_float32(held + here, own_left, found.v);
% endif
                }
% endfor
% if RINGS and whole:
                *(__global uint4 *)(signs + at) = rings;
% endif
                if (full) {
                    const float4 net = quarter_run(${", ".join(f"net{q}" for q in range(VECS))});
                    const float4 weight = quarter_run(${", ".join(f"weight{q}" for q in range(VECS))});
% if GPU:
                    net_sum += net;
                    weight_sum += weight;
% else:
                    add_run(net_lanes, j, net);
                    add_run(weight_lanes, j, weight);
% endif
                }
            </%def>
            <%def name="next_row()">
                    row_coder = coder_of(as_uint(most[row0 + down]));
            </%def>
            <%def name="rotated(whole)">
% if WORDS and whole:
                uint4 codes;
% for q in range(4):
                codes.s${q} = as_uint(convert_uchar4(encode_signed(vload4(${q}, own), row_coder, 0)));
% endfor
                *(__global uint4 *)(held + at) = codes;
% elif ROT >= 16:
% for q in range(VECS):
                put_whole(held, at + ${WIDTH * q}, left - ${WIDTH * q}, encode_signed(vload${WIDTH}(0, own + ${WIDTH * q}), row_coder, 0));
% endfor
% else:
% for q in range(VECS):
                if (left > ${WIDTH * q}) {
                    const vec row_most = values_of_rows(most, row0, column0 + j + ${WIDTH * q}, columns, rows);
                    const vec divisor = select((vec)(1.0f), row_most / 127.0f, as_uint${WIDTH}(row_most) >= LEAST_BLOCK);
                    const vec root = vload${WIDTH}(0, own + ${WIDTH * q});
                    const vec code = rint(select((vec)(0.0f), root, magnitudes(root) >= LEAST_NORMAL) / divisor);
                    put_codes(held, at + ${WIDTH * q}, left - ${WIDTH * q}, code);
                }
% endfor
% endif
            </%def>
        </%call>
% if GPU:
        const float chunk_net = halve_chunk(lanes, net_sum, lid), chunk_weight = halve_chunk(lanes, weight_sum, lid);
        if (lid == 0) {
            votes[2 * (first + chunk)] = chunk_net;
            votes[2 * (first + chunk) + 1] = chunk_weight;
        }
% else:
        votes[2 * (first + chunk)] = halve_chunk(net_lanes);
        votes[2 * (first + chunk) + 1] = halve_chunk(weight_lanes);
% endif
    </%call>
}
% elif NAME == "automagic_sum":
__kernel __attribute__((reqd_work_group_size(${ITEMS}, 1, 1)))
void automagic_sum(__global float *sums, const ulong chunks) {
    __local float lanes[1024];
    const float sum = sum_of_floats(sums, chunks, lanes, get_local_id(0));
    if (get_local_id(0) == 0) sums[chunks] = sum;
}
% elif NAME == "automagic_tally":
__kernel __attribute__((reqd_work_group_size(${ITEMS}, 1, 1)))
void automagic_tally(const __global float2 *votes, __global float *tally, const ulong place, const ulong chunks) {
    __local float2 lanes[1024];
    const float2 sum = sum_of_float2s(votes, chunks, lanes, get_local_id(0));
    if (get_local_id(0) == 0) {
        tally[2 * place] = sum.x;
        tally[2 * place + 1] = sum.y;
    }
}
% elif NAME == "automagic_rate":
<%
import math
SERIES = [1 / math.factorial(i) for i in range(12)]
%>
// exp of x in -1..1: x = k*ln(2) + r, and a polynomial of r. The first part of ln(2) has few bits, so that its product with k is exact.
inline float exp_of(float x) {
    const float k = rint(x * 1.44269504088896340736f);
    const float r = (x - k * 0.693359375f) + k * 2.12194440054690583e-4f;
    float series = ${f"{SERIES[11]!r}"}f;
% for factor in reversed(SERIES[:11]):
    series = series * r + ${repr(factor)}f;
% endfor
    return series * as_float((127 + (int)k) << 23);
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void automagic_rate(__global float *lr, __global float *tally, const uint tensors, const float min_lr, const float max_lr) {
    float net = 0.0f, all = 0.0f;
    for (uint t = 0; t < tensors; t++) {
        net += tally[2 * t];
        all += tally[2 * t + 1];
        tally[2 * t] = tally[2 * t + 1] = 0.0f;
    }
    const float signal = clamp(net / max(all, 1e-30f), -1.0f, 1.0f);
    *lr = clamp(*lr * exp_of(signal), min_lr, max_lr);
}
% else:
__kernel void add_rounded(__global ${stored(PARAM)} *total, const __global ${stored(GRAD)} *grad, const ulong n, const ulong per, const uint seed) {
    const ulong first = get_global_id(0) * per;
    for (ulong unit = first; unit < first + per && ${WIDTH} * unit < n; unit++) {
        const ulong at = ${WIDTH} * unit;
        const uint left = (uint)min(n - at, (ulong)${WIDTH});
        const vec sum = load_left_${PARAM}(total + at, left, 0.0f) + load_left_${GRAD}(grad + at, left, 0.0f);
        store_left_${PARAM}(total + at, left, written(sum, uniform_of_${WIDTH}(heads_at(at), seed ^ seed >> 16)));
    }
}
% endif
