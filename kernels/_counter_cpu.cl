// CPU shape of the row kernels: a work-item owns a block of rows and walks each in vectors of eight.
<%
GRAD = "__local" if FORM else "__global"
%>
% if FORM:
#include "_form_cpu.cl"
% endif

// Both sums of a row${" and its largest magnitude" if TERNARY else ""}: the lanes live in two private arrays of 128 vectors, which stay in the first-level cache.
inline float2 row_sums(const __global uchar *row, const ${GRAD} float *grad, uint n${", float *peak" if TERNARY else ""}) {
    float8 sq[128];
    float8 gt[128];
    const uint vectors = min((n + 7) / 8, 128u);
    uint used = 1;
    while (used < vectors) used *= 2;
    for (uint i = 0; i < used; i++) {
        sq[i] = (float8)(0.0f);
        gt[i] = (float8)(0.0f);
    }
% if TERNARY:
    float8 peaks = (float8)(0.0f);
% endif
    for (uint base = 0; base < n; base += 1024) {
        const uint full = min(n - base, 1024u) / 8;
        for (uint i = 0; i < full; i++) {
            const uint j = base + 8 * i;
            const float8 g = vload8(0, grad + j);
            const uint8 codes = ${"cc_load_8(row + j / 4 * 3)" if PACKED else "convert_uint8(vload8(0, row + j))"};
            sq[i] += g * g;
            gt[i] += g * code_ternary_8(${centred("codes", 8)});
% if TERNARY:
            peaks = fmax(peaks, fabs(g));
% endif
        }
        // The row's last elements, fewer than eight, one at a time in their own lanes.
        const uint stop = min(base + 1024, n);
        for (uint j = base + 8 * full; j < stop; j++) {
            const uint code = ${"cc_unpack_1(row, j)" if PACKED else "(uint)row[j]"};
            const float g = grad[j];
            const float product = g * code_ternary_1(${centred("code", "")});
            ((float *)&sq[full])[j % 8] += g * g;
            ((float *)&gt[full])[j % 8] += product;
% if TERNARY:
            peaks.s0 = fmax(peaks.s0, fabs(g));
% endif
        }
    }
% if TERNARY:
    *peak = fmax(fmax(fmax(peaks.s0, peaks.s1), fmax(peaks.s2, peaks.s3)), fmax(fmax(peaks.s4, peaks.s5), fmax(peaks.s6, peaks.s7)));
% endif
    for (uint mid = used / 2; mid > 0; mid /= 2) {
        for (uint i = 0; i < mid; i++) {
            sq[i] += sq[i + mid];
            gt[i] += gt[i + mid];
        }
    }
    return (float2)(halve_8(sq[0]), halve_8(gt[0]));
}

% if not FORM:
// sums float32 [rows, 2]: of grad^2 and of grad*t. A work-item owns `per` rows.
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void row_statistics(const __global uchar *state, const __global float *grad_w, __global float *sums, const uint n,
                    const uint rows, const uint per) {
    const uint first = get_global_id(0) * per;
    const uint last = min(first + per, rows);
    for (uint o = first; o < last; o++) {
% if TERNARY:
        float peak;
% endif
        const float2 both = row_sums(state + (size_t)o * (${ROW_BYTES[PACKED]}), grad_w + (size_t)o * n, n${", &peak" if TERNARY else ""});
        vstore2(both, o, sums);
    }
}

% endif
// One step of the tile's rows. `first_row` is the tile's place in state, scale and v; `index_base` the index of its first
// element in the whole layer, which the rounding hashes. A work-item owns `per` rows.
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void counter_update(${update_parameters()}) {
    const uint first = get_global_id(0) * per;
    const uint last = ${"clock[2] == 0 ? first : min(first + per, rows)" if CLOCK else "min(first + per, rows)"};
% if FORM:
    __local float formed[${FORM * PITCH}] __attribute__((aligned(64)));
% endif
    ${streams()}
    uint events = 0;
    uint flips = 0;
    uint skipped = 0;
    for (uint tile_row = first; tile_row < last; tile_row++) {
        const size_t o = (size_t)first_row + tile_row;
        __global uchar *row = state + o * (${ROW_BYTES[PACKED]});
% if FORM:
        const uint turn = (tile_row - first) % ${FORM};
        if (turn == 0) form_rows(formed, x, grad_out + tile_row, min(last - tile_row, ${FORM}u), n, tokens, rows);
        const __local float *grad = formed + ${PITCH} * turn;
% else:
        const __global float *grad = grad_w + (size_t)tile_row * n;
% endif
% if TERNARY:
        float peak;
% endif
        const float2 sums = row_sums(row, grad, n${", &peak" if TERNARY else ""});
        const RowStep step = row_step(sums.x, sums.y, scale[o], ${"v[o]" if USE_RMS else "0.0f"}, ${"s_base[o], " if LAZY else ""}${"g_sq[o], " if PROXY else ""}n, ${rate()}, lr_scale, beta,
                                      one_minus_beta, eps, clip, inv_sqrt_in);
        if (step.skip) {
            skipped++;
            continue;
        }
% if LAZY:
        s_base[o] = scale[o];
% endif
        scale[o] = step.scale;
        ${"v[o] = step.v;" if USE_RMS else ""}
% if CACHE:
        __global ${stored(CACHE)} *cached = cache + o * n;
% endif
        const ulong index = index_base + (ulong)tile_row * n;
        const uint low = (uint)index;
        const uint high = (uint)(index >> 32);
        const uint salt = index_salt(high);
        // A row whose index passes 2^32 goes element by element, so that vectors never straddle the border.
        const uint vector_end = (low + n < low) ? 0 : n / 8 * 8;
        uint8 moved = (uint8)(0);
        uint8 flipped = (uint8)(0);
        uint8 at_8 = low + (uint8)(0, 1, 2, 3, 4, 5, 6, 7);
        for (uint j = 0; j < vector_end; j += 8, at_8 += 8) {
            const uint8 head = hash_head_8(at_8 ^ salt);
            const float8 g = vload8(0, grad + j);
            const uint8 codes = ${"cc_load_8(row + j / 4 * 3)" if PACKED else "convert_uint8(vload8(0, row + j))"};
            const float8 now = tick_8(${centred("codes", 8)}, ${pulse("g", 8)}, step.k, step.r, head, mixed, ${"rebase_mixed, " if LAZY else ""}&moved, &flipped);
            const uint8 ticked = ${codes_of("now", 8)};
% if CACHE:
            const float8 before = ${centred("codes", 8)};
            // Hardly ever.
            if (any(code_ternary_8(before) != code_ternary_8(now))) {
% for e in range(8):
                ${patch(f"j + {e}", f"before.s{e}", f"now.s{e}")}
% endfor
            }
% endif
            ${"cc_store_8(row + j / 4 * 3, ticked)" if PACKED else "vstore8(convert_uchar8(ticked), 0, row + j)"};
        }
        for (uint q = vector_end / 4; 4 * q < n; q++) {
            uint4 codes = load_codes_4(row, q, n);
            uint now[4] = {codes.x, codes.y, codes.z, codes.w};
            for (uint e = 0; e < 4 && 4 * q + e < n; e++) {
                const uint at = low + 4 * q + e;
                const uint head = hash_head_1(at ^ (at < low ? index_salt(high + 1) : salt));
% if CACHE:
                const float old = ${centred("now[e]", "")};
% endif
                const float tick = tick_1(${centred("now[e]", "")}, ${pulse("grad[4 * q + e]", 1)}, step.k, step.r, head, mixed, ${"rebase_mixed, " if LAZY else ""}&events, &flips);
% if CACHE:
                ${patch("4 * q + e", "old", "tick")}
% endif
                now[e] = ${codes_of("tick", "")};
            }
            store_codes_4(row, q, n, (uint4)(now[0], now[1], now[2], now[3]));
        }
        events += sum_8(moved);
        flips += sum_8(flipped);
    }
    count_row(totals, events, flips, skipped);
}
