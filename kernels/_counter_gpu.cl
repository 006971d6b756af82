// GPU shape of the row kernels: a work-group of WG_SIZE items a row. Item i owns the groups of four columns i, i + WG_SIZE, ...;
// the first HELD of them stay in registers between the sums and the ticks, longer rows read the rest a second time.
//
// Lanes: group q holds lanes 4q..4q+3 mod 1024, so with SLOTS = 256/WG_SIZE an item keeps SLOTS float4 of lanes, group m of the
// item in slot m mod SLOTS.
<%
SLOTS = max(1, min(256 // WG_SIZE, HELD))
STAGE = min(WG_SIZE, 16)
%>
typedef struct {
    float4 sq[${SLOTS}];
    float4 gt[${SLOTS}];
% if TERNARY:
    float4 peaks;
% endif
} Lanes;

inline void add_group(Lanes *lanes, uint slot, float4 g, uint word) {
    lanes->sq[slot] += g * g;
    // g*t is exact, so adding it by a fused operation rounds the same.
    const float4 t = code_ternary_4(word_centred(word));
    lanes->gt[slot] = ${"fma(g, t, lanes->gt[slot])" if FUSED else "lanes->gt[slot] + g * t"};
% if TERNARY:
    lanes->peaks = fmax(lanes->peaks, fabs(g));
% endif
}

// The work-group's lanes added in the one order; the result is whole in item 0. Lanes lie in local memory in their own order, so
// every step reads neighbouring words: all items fold the lanes that lie WG_SIZE apart, a few fold what lies STAGE apart, one the rest.
inline float2 reduce_lanes(Lanes *lanes, __local float *sq, __local float *gt) {
    const uint lid = get_local_id(0);
    ((__local float4 *)sq)[lid] = ${halving_tree([f"lanes->sq[{s}]" for s in range(SLOTS)])};
    ((__local float4 *)gt)[lid] = ${halving_tree([f"lanes->gt[{s}]" for s in range(SLOTS)])};
    // Global memory too: every item has read the row's scale and v, which one item is about to write, and items beyond the
    // row's end its last group, which that group's owner is about to write.
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    const float sq_1 = ${halving_tree([f"sq[lid + {WG_SIZE * k}]" for k in range(4)])};
    const float gt_1 = ${halving_tree([f"gt[lid + {WG_SIZE * k}]" for k in range(4)])};
    // No barrier before these writes: an item overwrites a word that only it has read.
    sq[lid] = sq_1;
    gt[lid] = gt_1;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lid < ${STAGE}) {
        sq[lid] = ${halving_tree([f"sq[lid + {STAGE * k}]" for k in range(WG_SIZE // STAGE)])};
        gt[lid] = ${halving_tree([f"gt[lid + {STAGE * k}]" for k in range(WG_SIZE // STAGE)])};
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    float2 sums = (float2)(0.0f);
    if (lid == 0) {
        sums.x = ${halving_tree([f"sq[{k}]" for k in range(STAGE)])};
        sums.y = ${halving_tree([f"gt[{k}]" for k in range(STAGE)])};
    }
    return sums;
}

% if FORM:
#include "_form_gpu.cl"
% endif
<%def name="gather(unless='')">
    // Reads the row once and adds it to the lanes, keeping its first HELD groups. All loads come first and without
    // conditions, so that they are in flight together; an item beyond the row's end reads the last group and drops it.
    const uint groups = (n + 3) / 4;
    float4 held_grad[${HELD}];
    uint held_words[${HELD}];
    #pragma unroll
    for (uint m = 0; m < ${HELD}; m++) {
        const uint q = ${f'lid + {WG_SIZE} * m' if EVEN else f'min(lid + {WG_SIZE} * m, groups - 1)'};
        held_grad[m] = ${f"formed[{HELD} * f + m]" if FORM else "load_grad_4(grad, q, n)"};
        held_words[m] = load_word_4(row, q, n);
    }
    Lanes lanes;
% if TERNARY:
    lanes.peaks = (float4)(0.0f);
% endif
    #pragma unroll
    for (uint s = 0; s < ${SLOTS}; s++) {
        lanes.sq[s] = (float4)(0.0f);
        lanes.gt[s] = (float4)(0.0f);
    }
    #pragma unroll
    for (uint m = 0; m < ${HELD}; m++) {
% if EVEN:
        add_group(&lanes, m % ${SLOTS}, held_grad[m], held_words[m]);
% else:
        const float4 g = (${f"!{unless} && " if unless else ""}lid + ${WG_SIZE} * m < groups) ? held_grad[m] : (float4)(0.0f);
        add_group(&lanes, m % ${SLOTS}, g, held_words[m]);
% endif
    }
% if not FORM:
    for (uint base = lid + ${WG_SIZE * HELD}; base < groups; base += ${WG_SIZE * SLOTS}) {
        #pragma unroll
        for (uint s = 0; s < ${SLOTS}; s++) {
            const uint q = base + ${WG_SIZE} * s;
            if (q < groups) add_group(&lanes, s, load_grad_4(grad, q, n), load_word_4(row, q, n));
        }
    }
% endif
</%def>

% if not FORM:
// sums float32 [rows, 2]: of grad^2 and of grad*t. A work-group owns a row.
__kernel __attribute__((reqd_work_group_size(${WG_SIZE}, 1, 1)))
void row_statistics(const __global uchar *state, const __global float *grad_w, __global float *sums, const uint n,
                    const uint rows, const uint per) {
    __local float lanes_sq[${4 * WG_SIZE}] __attribute__((aligned(16)));
    __local float lanes_gt[${4 * WG_SIZE}] __attribute__((aligned(16)));
    const uint lid = get_local_id(0);
    const size_t o = get_group_id(0);
    const __global uchar *row = state + o * (${ROW_BYTES[PACKED]});
    const __global float *grad = grad_w + o * n;
    ${gather()}
    const float2 both = reduce_lanes(&lanes, lanes_sq, lanes_gt);
    if (lid == 0) vstore2(both, o, sums);
}

% endif
<%def name="tick_group(g, word)">
        const float4 gradient = ${g};
        const float4 old = word_centred(${word});
        float4 now = old;
        const uint at = low + 4 * q;
% if PACKED:
        // Rows and their first index are multiples of four: the group's indices differ in their last two bits alone, and none of
        // them passes 2^32 without the others.
        const uint base = at ^ (at < low ? salt_after : salt);
        const uint shifted = base ^ base >> 16;
% endif
        // One element at a time: compilers make more of plain conditions than of vector ones.
% for e, lane in enumerate("xyzw"):
% if PACKED:
        {
            uint head = (shifted ^ ${e}u) * 0x7feb352du;
            head = (head ^ head >> 15) * 0x846ca68bu;
            now.${lane} = tick_1(old.${lane}, ${pulse("gradient." + lane, 1)}, k, r, head, mixed, ${"rebase_mixed, " if LAZY else ""}&events, &flips);
        }
% else:
        if (4 * q + ${e} < n) {
            const uint head = hash_head_1((at + ${e}) ^ (at + ${e} < low ? salt_after : salt));
            now.${lane} = tick_1(old.${lane}, ${pulse("gradient." + lane, 1)}, k, r, head, mixed, ${"rebase_mixed, " if LAZY else ""}&events, &flips);
        }
% endif
% endfor
% if CACHE:
% for e, lane in enumerate("xyzw"):
        ${patch(f"4 * q + {e}", f"old.{lane}", f"now.{lane}")}
% endfor
% endif
% if PACKED:
        // The 24-bit group as one exact sum; each code is its centred value plus ${3 * C - 2}.
        const float sum = EXACT_MAD(now.w, 262144.0f, EXACT_MAD(now.z, 4096.0f, EXACT_MAD(now.y, 64.0f, now.x)));
        cc_store_group(row + 3 * (size_t)q, (uint)(sum + ${(3 * C - 2) * (1 + 64 + 4096 + 262144)}.0f));
% else:
        store_codes_4(row, q, n, ${codes_of("now", 4)});
% endif
</%def>

// One step of the tile's rows. `first_row` is the tile's place in state, scale and v; `index_base` the index of its first
// element in the whole layer, which the rounding hashes. A work-group owns ${"FORM rows, one after the other" if FORM else "a row"}.
__kernel __attribute__((reqd_work_group_size(${WG_SIZE}, 1, 1)))
void counter_update(${update_parameters()}) {
    __local float lanes_sq[${4 * WG_SIZE}] __attribute__((aligned(16)));
    __local float lanes_gt[${4 * WG_SIZE}] __attribute__((aligned(16)));
    __local float shared_k;
    __local float shared_r;
    __local uint shared_skip;
    __local uint shared_events;
    __local uint shared_flips;
% if TERNARY:
    __local uint shared_peak;
% endif
% if CLOCK:
    // Where the clock does not fire, rows of four columns and of no tokens are gone through, and left as they are; no gradient may be
    // there. (A return would be less, but after a return and a barrier PoCL 3.1 lets every item do what only the first one should.)
    const uint idle = clock[2] == 0;
    const uint n = idle ? min(columns, 4u) : columns;
% endif
    const uint lid = get_local_id(0);
% if FORM:
    const uint first = ${FORM} * get_group_id(0);
    const uint count = min(rows - first, ${FORM}u);
    float4 formed[${FORM * HELD}];
    form_groups(formed, x, grad_out + first, count, n, ${"idle ? 0 : tokens" if CLOCK else "tokens"}, rows);
    for (uint f = 0; f < count; f++) {
    const uint tile_row = first + f;
% else:
    const uint tile_row = get_group_id(0);
% endif
    const size_t o = (size_t)first_row + tile_row;
    __global uchar *row = state + o * (${ROW_BYTES[PACKED]});
% if not FORM:
    const __global float *grad = grad_w + (size_t)tile_row * n;
% endif
    // Asked for before the row, so that they are there when its sums are.
    const float s_old = scale[o];
    const float v_old = ${"v[o]" if USE_RMS else "0.0f"};
% if LAZY:
    const float base_old = s_base[o];
% endif
% if PROXY:
    const float given = g_sq[o];
% endif
% if TERNARY:
    if (lid == 0) shared_peak = 0;
% endif
    ${gather("idle" if CLOCK else "")}
    const float2 sums = reduce_lanes(&lanes, lanes_sq, lanes_gt);
% if TERNARY:
    // Magnitudes order as their bits do; the barriers of the sums lie behind its zero.
    atomic_max(&shared_peak, as_uint(fmax(fmax(lanes.peaks.x, lanes.peaks.y), fmax(lanes.peaks.z, lanes.peaks.w))));
% endif
    if (lid == 0) {
        ${"" if CLOCK else "const "}RowStep step = row_step(sums.x, sums.y, s_old, v_old, ${"base_old, " if LAZY else ""}${"given, " if PROXY else ""}n, ${rate()}, lr_scale, beta,
                                      one_minus_beta, eps, clip, inv_sqrt_in);
% if CLOCK:
        step.skip = step.skip || idle;
% endif
        shared_k = step.k;
        shared_r = step.r;
        shared_skip = step.skip;
        shared_events = 0;
        shared_flips = 0;
        if (!step.skip) {
% if LAZY:
            s_base[o] = s_old;
% endif
            scale[o] = step.scale;
            ${"v[o] = step.v;" if USE_RMS else ""}
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    const uint skip = shared_skip;
    if (!skip) {
        float events = 0.0f;
        float flips = 0.0f;
        ${streams()}
        const float k = shared_k;
        const float r = shared_r;
% if TERNARY:
        const float peak = as_float(shared_peak);
% endif
% if CACHE:
        __global ${stored(CACHE)} *cached = cache + o * n;
% endif
        const ulong index = index_base + (ulong)tile_row * n;
        const uint low = (uint)index;
        const uint salt = index_salt((uint)(index >> 32));
        const uint salt_after = index_salt((uint)(index >> 32) + 1);
        #pragma unroll
        for (uint m = 0; m < ${HELD}; m++) {
            const uint q = lid + ${WG_SIZE} * m;
            ${"" if EVEN else "if (q < groups)"} {
                ${tick_group("held_grad[m]", "held_words[m]")}
            }
        }
% if not FORM:
        for (uint q = lid + ${WG_SIZE * HELD}; q < groups; q += ${WG_SIZE}) {
            ${tick_group("load_grad_4(grad, q, n)", "load_word_4(row, q, n)")}
        }
% endif
        atomic_add(&shared_events, (uint)events);
        atomic_add(&shared_flips, (uint)flips);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lid == 0) count_row(totals, shared_events, shared_flips, ${"skip && !idle" if CLOCK else "skip"});
% if FORM:
    }
% endif
}
