// Adam on compressed moments: one step of up to COUNT tensors. memtrain_cl/reference/adam.py states the rule.
//
// Tensor t: param<t> [n<t>] of PARAM; grad<t> of GRAD; exp_avg<t> and exp_avg_sq<t>, which are float32 m and v where CODING is "dense", else codes of m
// and of sqrt(v) (int8 for "linear", uint8 for "dynamic" and "profile") with scales exp_avg_scale<t> and exp_avg_sq_scale<t>, one a block of
// `size` elements (of profiles a mean and a scale); skipped<t> int32 [2]. A tensor has ceil(n<t> / size) blocks, and all tensors `blocks`,
// numbered in their order. flags [tensors], zero before the step: which tensors are left out, or (SKIP "block") left out a block; this
// launch's begin at `first`.
//   adam_scan    flags a tensor that has a gradient beyond 2^63 or none that is a number
//   adam_step    the step: gradients, weights, codes and scales are read and written once
// GPU: LANES work-items share a block, SLOTS blocks a work-group, which takes `per` turns where codes are of a map (but one where PTX is 1);
// the block stays in registers between its first reading and the scales that all of it makes. With HELD 0 it is read again. CPU: a work-item
// takes `per` blocks, and keeps a block's new moments in local memory, with HELD 0 it computes them again. An element is read before it is
// written by the same item, so all is in place.
// Launched by memtrain_cl/ops/adam.py. Constants: NAME (the one kernel to render), GPU or not, PARAM and GRAD (elements), CODING, CODES, COUNT, DECAY ("" for
// none, "added" to the gradient, "shrink" of the weight), SKIP ("tensor" or "block"), CHANCE (codes are rounded stochastically), STOCHASTIC
// (that, or weights of 16 bits), PTX (_exact.cl), and those of _rows.cl. Where PTX is 1, inverse2 and inverse2_rest are the two parts of 1/root2, and
// quotients below `least` are doubted.
#pragma OPENCL FP_CONTRACT OFF

<%
TYPES = (PARAM, GRAD, "float32")
VECTOR_WIDTHS = (1, 4) if GPU else (1, 8)
SAVE = 0
MOST = "uint2"
%>
#include "_types.cl"
#include "_reduce.cl"
#include "_rows.cl"
#include "_rng.cl"
#include "_codes.cl"
#include "_quantize.cl"
#include "_exact.cl"
% if CODING in ("linear", "dynamic"):
#include "_moments.cl"
% elif CODING == "profile":
#include "_profile.cl"
% endif
% if PTX:
#include "_warps_max.cl"
% elif GPU:
#include "_lanes_max.cl"
% endif
<%
HOLDS = {"dense": "float", "linear": "char", "dynamic": "uchar", "profile": "uchar"}[CODING]
SCALED = CODING != "dense"
STEPS = NAME == "adam_step"

# (type, name) of what each tensor brings, in the order of the arguments.
OWN = [(f"const __global {stored(GRAD)} *", "grad"), ("const ulong ", "n")]
if STEPS:
    OWN += [(f"__global {stored(PARAM)} *", "param"), (f"__global {HOLDS} *", "exp_avg"), (f"__global {HOLDS} *", "exp_avg_sq")]
    OWN += [("__global float *", "exp_avg_scale"), ("__global float *", "exp_avg_sq_scale")] if SCALED else []
    OWN += [("volatile __global int *", "skipped")]
    OWN += [("const uint ", "seed")] if STOCHASTIC else []
CHARTS = {"dynamic": ", const __global float *chart", "profile": ", const __global float *table_m, const __global float *table_s"}.get(CODING, "")
QUICKENED = ", const float inverse2, const float inverse2_rest, const float least" if PTX else ""
TENSORS = ",\n    ".join(", ".join(f"{kind}{name}{t}" for kind, name in OWN) for t in range(COUNT))
%>
<%def name="tensor_known()">
        // The tensor that has the block, `within` blocks from its beginning.
        ulong within = block;
        uint which = 0;
% for kind, name in OWN:
        ${kind.removeprefix("const ") if "*" not in kind else kind}${name} = ${name}0;
% endfor
% for t in range(1, COUNT):
        if (which == ${t - 1} && within >= (n + size - 1) / size) {
            within -= (n + size - 1) / size;
            which = ${t};
% for _, name in OWN:
            ${name} = ${name}${t};
% endfor
        }
% endfor
        const ulong at = within * size;
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
        ${tensor_known()}
        // For the sake of the barriers no work-item leaves before them.
        uint count = block < blocks ? (uint)min((ulong)size, n - at) : 0;
% else:
    const ulong begin = get_global_id(0) * (ulong)per;
    const ulong end = min(begin + per, blocks);
    for (ulong block = begin; block < end; block++) {
        ${tensor_known()}
        const uint count = (uint)min((ulong)size, n - at);
% endif
</%def>
<%def name="vectors_begin()">
% if GPU:
        for (uint j = 4 * lane; j < count; j += ${4 * LANES}) {
% else:
        for (uint j = 0; j < count; j += 8) {
% endif
</%def>
% if NAME == "adam_scan":
__kernel __attribute__((reqd_work_group_size(${LANES * SLOTS}, 1, 1)))
void adam_scan(${TENSORS},
    volatile __global int *flags, const uint first, const uint size, const ulong blocks, const uint per) {
    ${blocks_begin()}
        uint${WIDTH} most = (uint${WIDTH})(0);
% if PTX and HELD:
        // Of whole blocks without conditions, so that all of one is asked for before any of it is awaited.
        vec held[${HELD}];
        if (count == ${4 * LANES * HELD}) {
            #pragma unroll
            for (uint k = 0; k < ${HELD}; k++) held[k] = load_${GRAD}(grad + at + 4 * (lane + k * ${LANES}));
            #pragma unroll
            for (uint k = 0; k < ${HELD}; k++) most = max(most, magnitudes(held[k]));
            count = 0;
        }
% endif
        ${vectors_begin()}
            most = max(most, magnitudes(load_left_${GRAD}(grad + at + j, count - j, 0.0f)));
        }
        if (highest(most) > GRADIENT_MAX) atomic_or(flags + first + which, 1);
    }
}
% else:
#include "_adam_rule.cl"

__kernel __attribute__((reqd_work_group_size(${LANES * SLOTS}, 1, 1)))
void adam_step(${TENSORS},
    volatile __global int *flags, const uint first, const uint size, const ulong blocks, const uint per,
    const int step, const float sign, const float decay, const float beta1, const float rest1, const float beta2, const float rest2,
    const float step_size, const float root2, const float eps, const float bound${QUICKENED}${CHARTS}) {
    const adam_rule rule = {sign, decay, beta1, rest1, beta2, rest2, step_size, root2, eps, bound${", inverse2, inverse2_rest, least" if PTX else ""}};
% if CODING == "dense":
#include "_adam_dense.cl"
% elif CODING == "profile":
#include "_adam_profile.cl"
% else:
#include "_adam_blocks.cl"
% endif
}
% endif
