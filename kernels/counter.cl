// Counter weights: row statistics, and the update of one step.
//
// state   uchar [rows, in/4*3] packed 6-bit codes, or [rows, in] codes (PACKED = 0)
// scale, v, grad_w   float32 [rows], [rows], [rows of the tile, in]
// FORM > 0: in place of grad_w come x float32 [tokens, in] and grad_out float32 [tokens, out], and the gradient of FORM rows at a
// time is formed by whoever updates them, each element a sum over the tokens in their order: grad_out[0]*x[0] + grad_out[1]*x[1] + ...
// s_base, g_sq       float32 [rows] each: what LAZY reads and writes, what PROXY reads in place of the gradient's mean square
// clock              int64 [4], see clock.cl: CLOCK updates only where it fires, by lr times its period
// cache              CACHE [rows, in], the ternary weights as int8 or float16: those that change are written
// One template, two shapes: GPU = 1 gives a work-group a row with the gradient kept in registers; GPU = 0 a work-item a block
// of rows, in vectors of eight, without barriers.
//
// Launched by memtrain_cl/ops/counter.py.
// Constants: C, PACKED, GPU; ALIGNED (grad_w's rows begin on 16 bytes and are whole groups of four); LAGGED, USE_RMS, PROXY, CLIP,
// CLIPPED_SCALE, LAZY (rebase), TERNARY (pulse), CLOCK, CACHE ("" for none), FORM (0 for none; ALIGNED speaks of x then). Read by
// GPU = 0 only: PITCH (columns of a formed row's place, a multiple of 16). By GPU = 1 only: WG_SIZE (items a row), HELD (groups of four
// an item keeps in registers, a multiple of 256/WG_SIZE in rows of more groups than items, all of them where it forms them), EVEN
// (a row's groups are exactly WG_SIZE * HELD), FUSED (fma keeps subnormals: llvmpipe's does not, though its other operations do).
#pragma OPENCL FP_CONTRACT OFF

<%
VECTOR_WIDTHS = (1, 4) if GPU else (1, 4, 8)
%>
#include "_rng.cl"
% if CACHE:
#include "_types.cl"
% endif
#include "_code6.cl"
#include "_reduce.cl"
#include "_counter_state.cl"
#include "_tick.cl"

inline float4 load_grad_4(const __global float *row, uint q, uint n) {
% if ALIGNED:
    return ((const __global float4 *)row)[q];
% else:
    const uint j = 4 * q;
    if (j + 4 <= n) return vload4(q, row);
    return (float4)(row[j], j + 1 < n ? row[j + 1] : 0.0f, j + 2 < n ? row[j + 2] : 0.0f, 0.0f);
% endif
}

// ---- one row's part of the update ---------------------------------------------------------------------------------------

typedef struct {
    float k;      // (lr/denom)*(C/s_new); LAZY: (lr/denom)*(C/s_old)
    float r;      // s_old/s_new; LAZY: s_base/s_old
    float scale;  // s_new
    float v;      // the row's new second moment
    uint skip;    // the gradient is not finite: the row stays as it is
} RowStep;

// From the row's sums (of grad^2 and of grad*t) and its old scale and v to what every element needs. The order of operations
// is part of the format: it decides bytes.
inline RowStep row_step(float sum_sq, float sum_gt, float s, float v_old, ${"float s_base, " if LAZY else ""}${"float given, " if PROXY else ""}uint n, float lr, float lr_scale, float beta,
                        float one_minus_beta, float eps, float clip, float inv_sqrt_in) {
    RowStep step;
    const float count = (float)n;
    const float g_sq = ${"given" if PROXY else "sum_sq / count"};
    float denom = 1.0f;
    step.v = v_old;
% if USE_RMS:
    const float kept = beta * v_old;
    const float fresh = one_minus_beta * g_sq;
    step.v = kept + fresh;
    denom = fmax(sqrt(${"v_old" if LAGGED else "step.v"}), eps);
% endif
% if CLIP:
    const float norm = sqrt(g_sq * count) / denom;
    denom = denom / fmin(1.0f, clip / fmax(norm, 1e-30f));
% endif
    float grad_s = sum_gt * inv_sqrt_in;
% if CLIPPED_SCALE:
    grad_s = grad_s / denom;
% endif
    const float change = lr_scale * grad_s;
    step.scale = clamp(s - change, 1e-5f, 10.0f);
    const float per_lr = lr / denom;
    const float per_quantum = ${C}.0f / ${"s" if LAZY else "step.scale"};
    step.k = per_lr * per_quantum;
    step.r = ${"s_base / s" if LAZY else "s / step.scale"};
    step.skip = !isfinite(sum_sq);
% if PROXY:
    if (!(isfinite(given) && given >= 0.0f)) step.skip = 1;
% endif
% if LAZY:
    // No update leaves scales behind for which this happens, but they may come from elsewhere.
    if (!(isfinite(step.k) && isfinite(${C}.0f * step.r))) step.skip = 1;
% endif
    return step;
}

// The 64-bit totals (events, flips, skipped rows) as pairs of 32-bit halves; integer sums do not depend on their order.
inline void add_total(volatile __global uint *pair, uint amount) {
    if (amount == 0) return;
    const uint before = atomic_add(pair, amount);
    if (before + amount < before) atomic_inc(pair + 1);
}

inline void count_row(volatile __global uint *totals, uint events, uint flips, uint skipped) {
    add_total(totals, events);
    add_total(totals + 2, flips);
    add_total(totals + 4, skipped);
}

<%def name="update_parameters()">
__global uchar *state, __global float *scale, __global float *v,
% if FORM:
                    const __global float *x, const __global float *grad_out, const uint tokens,
% else:
                    const __global float *grad_w,
% endif
                    volatile __global uint *totals,
% if LAZY:
                    __global float *s_base,
% endif
% if PROXY:
                    const __global float *g_sq,
% endif
% if CLOCK:
                    const __global long *clock,
% endif
% if CACHE:
                    __global ${stored(CACHE)} *cache,
% endif
                    const uint ${"columns" if CLOCK and GPU else "n"}, const uint rows, const uint per, const uint first_row,
                    const ulong index_base, const uint seed, const float lr, const float lr_scale, const float beta,
                    const float one_minus_beta, const float eps, const float clip, const float inv_sqrt_in</%def>
// The step size: that of all the steps since the last update.
<%def name="rate()">${"lr * (float)clock[0]" if CLOCK else "lr"}</%def>
// Writes the ternary weight of element j to its row of the cache where a tick changed it, from one centred value to another.
<%def name="patch(j, before, after)">
            if (code_ternary_1(${before}) != code_ternary_1(${after})) ${store(CACHE, "cached", j, f"code_ternary_1({after})")};
</%def>
// The gradient that an element's tick takes.
<%def name="pulse(g, width)">${f"pulse_{width}({g}, peak, head, pulse_mixed)" if TERNARY else g}</%def>
// The streams of chance of a step: the rounding's is the seed's own, stream n that of hash_u32(seed + n*0x9e3779b9).
<%def name="streams()">
    const uint mixed = seed ^ seed >> 16;
% if LAZY:
    const uint rebase_seed = hash_u32_1(seed + ${0x9e3779b9}u);
    const uint rebase_mixed = rebase_seed ^ rebase_seed >> 16;
% endif
% if TERNARY:
    const uint pulse_seed = hash_u32_1(seed + ${2 * 0x9e3779b9 % 2**32}u);
    const uint pulse_mixed = pulse_seed ^ pulse_seed >> 16;
% endif
</%def>
% if GPU:
#include "_counter_gpu.cl"
% else:
#include "_counter_cpu.cl"
% endif
