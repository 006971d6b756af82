// Kernels of kernels/stochastic.cl over rows that are contiguous. Each of `spans` is a part of a row, `n` elements but for a row's last:
// `splits` spans a row of `length`. A row at once is a span. GPU: LANES work-items share a span; CPU: a work-item takes `per` spans.
<%
ROWS_KERNEL = NAME
READS = "dequantize" not in NAME
SCANS = NAME in ("quantize_rows", "absmax_rows")
WRITES = NAME in ("quantize_rows", "scaled_rows")
CODE = {"int8": "char", "int16": "short", "int4": "uchar"}[CODES]
ARGUMENTS = {
    "quantize_rows": f"{SOURCE}, {FACTORS}__global {CODE} *codes, {SCALES}",
    "absmax_rows": f"{SOURCE}, {FACTORS}__global uint *parts",
    "scaled_rows": f"{SOURCE}, {FACTORS}__global {CODE} *codes, const {SCALES}",
    "dequantize_rows": f"const __global {CODE} *codes, const {SCALES}, __global {stored(X)} *y",
}[NAME]
CHANCE = ", const float levels, const uint seed, const ulong base" if WRITES else ""
REPORTS = FAULTS if NAME == "quantize_rows" else ""

def values(j, left):
    v = f"load_left_{X}(source + {j}, {left}, 0.0f)"
    return f"{v} * load_left_float32(multiplier + begin + {j}, {left}, 0.0f)" if MULTIPLIED else v
%>
<%def name="span_begins()">
        const size_t row = splits == 1 ? span : ${"(uint)span" if GPU else "span"} / splits;
        const uint begin = (uint)(span - row * splits) * n;
        const uint count = min(n, length - begin);
        const ulong at = row * length + begin;
% if READS:
        const __global ${stored(X)} *source = x + x0 + at;
% endif
</%def>
<%def name="put(v, j, left)">
% if WRITES and FIXED:
                put_packed(codes, at + ${j}, ${left}, fixed_word(${v}, by, heads_near(around, low + ${j}), mixed, bound));
% elif WRITES:
                put_codes(codes, at + ${j}, ${left}, codes_of(${v}, divisor, least, heads_at(base + at + ${j}), mixed, levels));
% else:
                store_left_${X}(y + at + ${j}, ${left}, take_codes(codes, at + ${j}, ${left}) * own_scale);
% endif
</%def>
<%def name="scale_known()">
% if WRITES and FIXED:
        const quantum by = quantum_of(own_scale);
        const float bound = levels * 0x1p24f;
        const salts around = near(base${" + at" if FAR else ""});
        const uint low = (uint)(base + at);
        const uint mixed = seed ^ seed >> 16;
% elif WRITES:
        const vec divisor = (vec)(divisor_of(own_scale));
        const uint${WIDTH} least = (uint${WIDTH})(least_of(own_scale));
        const uint mixed = seed ^ seed >> 16;
% endif
</%def>
% if GPU:
<% MOST = "uint" %>
% if PTX:
#include "_warps_max.cl"
% else:
#include "_lanes_max.cl"
% endif

__kernel __attribute__((reqd_work_group_size(${LANES * SLOTS}, 1, 1)))
void ${ROWS_KERNEL}(${ARGUMENTS}, const uint n, const uint spans, const uint per, const uint splits, const uint length${CHANCE}${REPORTS}) {
    const uint lane = get_local_id(0) % ${LANES};
    const uint slot = get_local_id(0) / ${LANES};
    const size_t span = (size_t)get_group_id(0) * ${SLOTS} + slot;
    // For the sake of the barriers no work-item leaves before them.
    const uint within = span < spans;
% if SCANS:
    __local uint scratch[${SLOTS * (LANES + MOST_STAGE)}];
    // Bits without the sign, twice as large: GPUs shift to the left beside the hash, and mask on its own pipe.
    uint4 most_4 = (uint4)(0);
% endif
    ${span_begins()}
    const uint units = within ? (count - 1) / 4 + 1 : 0;
% if SCANS:
% if HELD and WRITES:
    vec held[${HELD}];
    #pragma unroll
    for (uint k = 0; k < ${HELD}; k++) {
        const uint j = 4 * (lane + k * ${LANES});
        held[k] = (vec)(0.0f);
        if (lane + k * ${LANES} < units) held[k] = ${values("j", "count - j")};
    }
    #pragma unroll
    for (uint k = 0; k < ${HELD}; k++) most_4 = max(most_4, as_uint4(held[k]) << 1);
% else:
    for (uint unit = lane; unit < units; unit += ${LANES}) {
        most_4 = max(most_4, as_uint4(${values("4 * unit", "count - 4 * unit")}) << 1);
    }
% endif
    const uint most = lanes_max(highest(most_4) >> 1, scratch + slot * ${LANES + MOST_STAGE}, lane);
% endif
% if NAME == "absmax_rows":
    if (lane == 0 && within) parts[span] = most;
% else:
% if SCANS:
    const float own_scale = scale_of(most, levels);
    if (lane == 0 && within) {
            ${put_scale("row", "row")}
    }
% else:
    const float own_scale = within ? ${load(SCALE, "scale", "row")} : 0.0f;
% endif
    ${scale_known()}
% if HELD and SCANS:
    #pragma unroll
    for (uint k = 0; k < ${HELD}; k++) {
        const uint j = 4 * (lane + k * ${LANES});
        if (lane + k * ${LANES} < units) {
            ${put("held[k]", "j", "count - j")}
        }
    }
% else:
    for (uint unit = lane; unit < units; unit += ${LANES}) {
        ${put(values("4 * unit", "count - 4 * unit"), "4 * unit", "count - 4 * unit")}
    }
% endif
% endif
}
% else:
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void ${ROWS_KERNEL}(${ARGUMENTS}, const uint n, const uint spans, const uint per, const uint splits, const uint length${CHANCE}${REPORTS}) {
    const size_t first = get_global_id(0) * (size_t)per;
    const size_t last = min(first + per, (size_t)spans);
    for (size_t span = first; span < last; span++) {
        ${span_begins()}
        const uint full = count / 8 * 8;
% if SCANS:
        // Four, because each waits for the one before it.
        uint8 most_8[4] = {(uint8)(0), (uint8)(0), (uint8)(0), (uint8)(0)};
        uint j = 0;
        for (; j + 32 <= full; j += 32) {
% for i in range(4):
            most_8[${i}] = max(most_8[${i}], magnitudes(${values(f"j + {8 * i}", "8")}));
% endfor
        }
        for (; j < count; j += 8) most_8[0] = max(most_8[0], magnitudes(${values("j", "count - j")}));
        const uint most = highest(max(max(most_8[0], most_8[1]), max(most_8[2], most_8[3])));
% endif
% if NAME == "absmax_rows":
        parts[span] = most;
% else:
% if SCANS:
        const float own_scale = scale_of(most, levels);
            ${put_scale("row", "row")}
% else:
        const float own_scale = ${load(SCALE, "scale", "row")};
% endif
        ${scale_known()}
        for (uint i = 0; i < full; i += 8) {
            ${put(values("i", "8"), "i", "8")}
        }
        if (full < count) {
            ${put(values("full", "count - full"), "full", "count - full")}
        }
% endif
    }
}
% endif
