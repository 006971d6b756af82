// Reductions over a dimension of a strided tensor: sums, products, extremes and where they lie, norms, moments.
//
//   out[q] = finish(merge over k < count of x[x0 + base(q) + k*step])
//   base(q) = q / inner * outer_stride + q % inner * inner_stride,  q < kept
//
// A lane absorbs elements in ascending k into an Acc; lanes, and parts of long rows, merge in one fixed order: no atomics.
// With more than one part a second kernel, reduce_parts, merges what the parts left in `partials`, at
// q*part_row + part*part_step.
//
// Constants: GPU (a work-group of WG_SIZE items shares rows or columns through local memory) or not (a work-item walks rows, or
// panels of neighbouring columns, in vectors of eight); OP, below; IN and OUT, element types; FIELDS, how many numbers an Acc
// holds (the launcher sizes `partials` by it). Launched by memtrain_cl/launchers/reduce.py.
//
//   sum, prod, nansum    in OUT's compute type; a floating sum is divided by `divisor` (a mean)
//   amax, amin           NaN wins          aminmax          both, the largest into `second`
//   argmax, argmin       the first place of the extreme, NaN's first where there is one
//   max, min             the extreme, and its place into `second`
//   any, all, count      of what is not 0
//   norm0, norm1, norm2, normp (sum |x|^power)^(1/power), normmax, normmin
//   var, std             m2/divisor, its square root; var_mean, std_mean: and the mean into `second`
//   logsumexp
#include "_accumulate.cl"
<%
UNROLL = 8
# Vectors that are on their way at a time on CPUs: one where absorbing takes longer than loading, as the code grows with them.
VECTORS = 4 if OP in ("sum", "norm1", "norm2", "amax", "amin") else 1
OUT_ARGUMENTS = f"__global {stored(OUT)} *out, const ulong out0, {SECOND}"
FINISH = "finish(&acc, out, out0 + q, " + ("second, second0 + q, " if HAS_SECOND else "") + "divisor, power)"
EMIT = "if (parts > 1) partials[q * part_row + part * part_step] = acc; else " + FINISH
%>
inline ulong base_of(const ulong x0, const uint q, const uint inner, const ulong outer_stride, const ulong inner_stride) {
    const uint row = inner == 1 ? q : q / inner;
    return x0 + row * outer_stride + (q - row * inner) * inner_stride;
}

% if GPU:
// A group holds `lanes` lanes for each of WG_SIZE/lanes results, powers of two. Lane and result of an item are bits of its
// number: neighbouring items are lanes of a row (lane_shift 0), or neighbouring columns (place_shift 0).
<%def name="places()">
    __local Acc shared[${WG_SIZE}];
    const uint item = get_local_id(0);
    const uint lane = item >> lane_shift & lanes - 1;
    const uint held = ${WG_SIZE} / lanes;
    const uint q = get_group_id(0) * held + (item >> place_shift & held - 1);
    Acc acc;
    nothing(&acc);
</%def>
<%def name="join_lanes()">
    shared[item] = acc;
    for (uint half_lanes = lanes / 2; half_lanes > 0; half_lanes /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lane < half_lanes) {
            const Acc other = shared[item + (half_lanes << lane_shift)];
            merge(&acc, &other);
            shared[item] = acc;
        }
    }
    if (lane > 0 || q >= kept) return;
</%def>
__kernel __attribute__((reqd_work_group_size(${WG_SIZE}, 1, 1)))
void reduce(const __global ${stored(IN)} *x, const ulong x0, ${OUT_ARGUMENTS}__global Acc *partials, const uint kept,
            const uint inner, const ulong outer_stride, const ulong inner_stride, const ulong step, const ulong count,
            const uint parts, const ulong chunk, const ulong part_row, const ulong part_step, const uint lanes,
            const uint lane_shift, const uint place_shift, const float divisor, const float power) {
    ${places()}
    const uint part = get_group_id(1);
    if (q < kept) {
        const ulong end = min(count, (part + 1) * chunk);
        ulong k = part * chunk + lane;
        ulong at = base_of(x0, q, inner, outer_stride, inner_stride) + k * step;
        const ulong hop = lanes * step;
        // Eight loads are on their way at a time.
        for (; k + ${UNROLL - 1} * lanes < end; k += ${UNROLL} * lanes, at += ${UNROLL} * hop) {
            ${X} ahead[${UNROLL}];
% for u in range(UNROLL):
            ahead[${u}] = ${load(IN, "x", f"at + {u} * hop")};
% endfor
% for u in range(UNROLL):
            absorb(&acc, ahead[${u}], (${I})(k + ${u} * lanes), power);
% endfor
        }
        for (; k < end; k += lanes, at += hop) absorb(&acc, ${load(IN, "x", "at")}, (${I})k, power);
    }
    ${join_lanes()}
    ${EMIT};
}

__kernel __attribute__((reqd_work_group_size(${WG_SIZE}, 1, 1)))
void reduce_parts(const __global Acc *partials, ${OUT_ARGUMENTS}const uint kept, const uint parts, const ulong part_row,
                  const ulong part_step, const uint lanes, const uint lane_shift, const uint place_shift, const float divisor,
                  const float power) {
    ${places()}
    if (q < kept) {
        for (uint part = lane; part < parts; part += lanes) {
            const Acc other = partials[q * part_row + part * part_step];
            merge(&acc, &other);
        }
    }
    ${join_lanes()}
    ${FINISH};
}
% else:
inline void lane_of(const Acc_8 *acc, const uint j, Acc *one) {
% for kind, name in MEMBERS:
    one->${name} = ((const ${kind} *)&acc->${name})[j];
% endfor
}

// Dimension 0: items, each of `per` rows, or of `per` panels of up to PANEL neighbouring columns (paneled: inner_stride is 1).
// Dimension 1: parts of the reduced dimension.
#define PANEL 32u
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void reduce(const __global ${stored(IN)} *x, const ulong x0, ${OUT_ARGUMENTS}__global Acc *partials, const uint kept,
            const uint inner, const ulong outer_stride, const ulong inner_stride, const ulong step, const ulong count,
            const uint parts, const ulong chunk, const ulong part_row, const ulong part_step, const uint paneled, const uint per,
            const float divisor, const float power) {
    const ${wide(I, 8)} ascending = (${wide(I, 8)})(0, 1, 2, 3, 4, 5, 6, 7);
    const uint part = get_global_id(1);
    const ulong begin = part * chunk;
    const ulong end = min(count, begin + chunk);
    const uint panels = paneled ? (inner + PANEL - 1) / PANEL : inner;
    const uint first = get_global_id(0) * per;
    const uint last = min(first + per, kept / inner * panels);
    for (uint unit = first; unit < last; unit++) {
        const uint outer = unit / panels;
        const uint column = (unit - outer * panels) * (paneled ? PANEL : 1);
        const ulong base = x0 + outer * outer_stride + column * inner_stride;
        uint q = outer * inner + column;
        if (!paneled) {
            Acc acc;
            nothing(&acc);
            ulong k = begin;
            if (step == 1) {
                Acc_8 lanes;
                nothing_8(&lanes);
% if VECTORS > 1:
                Acc_8 others[${VECTORS - 1}];
                for (uint v = 0; v < ${VECTORS - 1}; v++) nothing_8(others + v);
                for (; k + ${8 * VECTORS} <= end; k += ${8 * VECTORS}) {
                    absorb_8(&lanes, ${load_8(IN, "x", "base + k")}, (${I})k + ascending, power);
% for v in range(1, VECTORS):
                    absorb_8(others + ${v - 1}, ${load_8(IN, "x", f"base + k + {8 * v}")}, (${I})(k + ${8 * v}) + ascending,
                             power);
% endfor
                }
                for (uint v = 0; v < ${VECTORS - 1}; v++) merge_8(&lanes, others + v);
% endif
                for (; k + 8 <= end; k += 8) {
                    absorb_8(&lanes, ${load_8(IN, "x", "base + k")}, (${I})k + ascending, power);
                }
                for (uint j = 0; j < 8; j++) {
                    Acc one;
                    lane_of(&lanes, j, &one);
                    merge(&acc, &one);
                }
            }
            for (; k < end; k++) absorb(&acc, ${load(IN, "x", "base + k * step")}, (${I})k, power);
            ${EMIT};
            continue;
        }
        const uint width = min(inner - column, PANEL);
        uint j = 0;
% if VECTORS > 1:
        if (width == PANEL) {
            Acc_8 columns[${VECTORS}];
            for (uint v = 0; v < ${VECTORS}; v++) nothing_8(columns + v);
            ulong at = base + begin * step;
            for (ulong k = begin; k < end; k++, at += step) {
% for v in range(VECTORS):
                absorb_8(columns + ${v}, ${load_8(IN, "x", f"at + {8 * v}")}, (${wide(I, 8)})((${I})k), power);
% endfor
            }
            for (; j < PANEL; j++, q++) {
                Acc acc;
                lane_of(columns + j / 8, j & 7, &acc);
                ${EMIT};
            }
        }
% endif
        while (j + 8 <= width) {
            Acc_8 columns;
            nothing_8(&columns);
            for (ulong k = begin; k < end; k++) {
                absorb_8(&columns, ${load_8(IN, "x", "base + j + k * step")}, (${wide(I, 8)})((${I})k), power);
            }
            for (const uint stop = j + 8; j < stop; j++, q++) {
                Acc acc;
                lane_of(&columns, j & 7, &acc);
                ${EMIT};
            }
        }
        for (; j < width; j++, q++) {
            Acc acc;
            nothing(&acc);
            for (ulong k = begin; k < end; k++) {
                absorb(&acc, ${load(IN, "x", "base + j + k * step")}, (${I})k, power);
            }
            ${EMIT};
        }
    }
}

// An item merges the parts of `per` results.
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void reduce_parts(const __global Acc *partials, ${OUT_ARGUMENTS}const uint kept, const uint parts, const ulong part_row,
                  const ulong part_step, const uint per, const float divisor, const float power) {
    const uint first = get_global_id(0) * per;
    const uint last = min(first + per, kept);
    for (uint q = first; q < last; q++) {
        Acc acc = partials[q * part_row];
        for (uint part = 1; part < parts; part++) {
            const Acc other = partials[q * part_row + part * part_step];
            merge(&acc, &other);
        }
        ${FINISH};
    }
}
% endif
