// Running sums, products and extremes along a dimension of a strided tensor.
//
//   out[place(q, k)] = combine over j <= k of x[x0 + base(q) + j*step],  q < kept, k < length
//   base(q) = q / inner * outer_stride + q % inner * inner_stride        place(q, k) = (q / after * length + k) * after + q % after
//
// A run may be cut into parts of `chunk` elements: `scan` with totals = 1 leaves what each part comes to in
// carries[q*parts + part], scan_carries makes of these what comes before each part, and `scan` with totals = 0 begins there.
//
// Constants: GPU (a work-group scans a part of a run, or a work-item one of a column where neighbouring results lie closer than
// neighbours of a run; WG_SIZE items) or not (a work-item scans parts of `per` runs); OP: cumsum, cumprod in OUT's compute type,
// cummax, cummin with the last places of the extremes in `second`, int64; IN, OUT: element types; FIELDS: numbers in an Acc.
// Launched by memtrain_cl/launchers/scan.py.
<%
EXTREME = OP in ("cummax", "cummin")
T = compute(IN) if EXTREME else compute(OUT)
I = "ulong" if T == "long" else "uint"
LEAST = {"long": "LONG_MIN", "int": "INT_MIN", "float": "-INFINITY"}[T]
GREATEST = {"long": "LONG_MAX", "int": "INT_MAX", "float": "INFINITY"}[T]
NOTHING = {"cumsum": "0", "cumprod": "1", "cummax": LEAST, "cummin": GREATEST}[OP]
SECOND = "__global long *second, const ulong second0, " if EXTREME else ""
AHEAD = 8
%>
#include "_types.cl"

typedef struct {
    ${T} value;
% if EXTREME:
    ${I} index;
% endif
} Acc;
// The launcher allots FIELDS numbers to an Acc.
typedef char acc_has_its_size[sizeof(Acc) == ${FIELDS} * sizeof(${T}) ? 1 : -1];

inline Acc made(const ${T} value, const ulong index) {
    Acc acc;
    acc.value = value;
% if EXTREME:
    acc.index = (${I})index;
% endif
    return acc;
}

// a stands for elements before b's. A NaN wins, and of equals the later.
inline Acc combine(const Acc a, const Acc b) {
% if EXTREME:
    return (b.value != b.value || (a.value == a.value && b.value ${">=" if OP == "cummax" else "<="} a.value)) ? b : a;
% else:
    return made(a.value ${"+" if OP == "cumsum" else "*"} b.value, 0);
% endif
}

inline ulong base_of(const ulong x0, const uint q, const uint inner, const ulong outer_stride, const ulong inner_stride) {
    const uint row = inner == 1 ? q : q / inner;
    return x0 + row * outer_stride + (q - row * inner) * inner_stride;
}

inline void put(const Acc acc, __global ${stored(OUT)} *out, const ulong out0, ${SECOND}const uint q, const ulong k,
                const ulong length, const uint after) {
    const uint before = q / after;
    const ulong place = (before * length + k) * after + (q - before * after);
    ${store(OUT, "out", "out0 + place", "acc.value")};
% if EXTREME:
    second[second0 + place] = (long)acc.index;
% endif
}
<%
ARGUMENTS = (
    f"const __global {stored(IN)} *x, const ulong x0, __global {stored(OUT)} *out, const ulong out0, {SECOND}"
    "__global Acc *carries, const uint kept, const uint inner, const ulong outer_stride, const ulong inner_stride, "
    "const ulong step, const ulong length, const uint after, const uint parts, const ulong chunk, const uint columns, "
    "const uint per, const uint totals"
)
PUT = f"put(%s, out, out0, {'second, second0, ' if EXTREME else ''}q, %s, length, after)"
%>
% if GPU:
__kernel __attribute__((reqd_work_group_size(${WG_SIZE}, 1, 1)))
void scan(${ARGUMENTS}) {
    __local Acc shared[${WG_SIZE}];
    const uint item = get_local_id(0);
    const uint part = get_group_id(1);
    const uint q = columns ? get_global_id(0) : get_group_id(0);
    const ulong begin = part * chunk;
    const ulong end = min(length, begin + chunk);
    if (q >= kept) return;
    const ulong base = base_of(x0, q, inner, outer_stride, inner_stride);
    Acc carry = parts > 1 && !totals ? carries[(ulong)q * parts + part] : made(${NOTHING}, 0);
    if (columns) {
        for (ulong k = begin; k < end; k++) {
            carry = combine(carry, made(${load(IN, "x", "base + k * step")}, k));
            if (!totals) ${PUT % ("carry", "k")};
        }
        if (totals) carries[(ulong)q * parts + part] = carry;
        return;
    }
    for (ulong tile = begin; tile < end; tile += ${WG_SIZE * AHEAD}) {
        // Eight neighbours an item, then the items' totals, then what comes before both.
        const ulong first = tile + item * ${AHEAD};
        Acc own[${AHEAD}];
        Acc sum = made(${NOTHING}, 0);
        for (uint u = 0; u < ${AHEAD}; u++) {
            const ulong k = first + u;
            if (k < end) sum = combine(sum, made(${load(IN, "x", "base + k * step")}, k));
            own[u] = sum;
        }
        shared[item] = sum;
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint apart = 1; apart < ${WG_SIZE}; apart *= 2) {
            if (item >= apart) sum = combine(shared[item - apart], sum);
            barrier(CLK_LOCAL_MEM_FENCE);
            shared[item] = sum;
            barrier(CLK_LOCAL_MEM_FENCE);
        }
        if (!totals) {
            const Acc before = item > 0 ? combine(carry, shared[item - 1]) : carry;
            for (uint u = 0; u < ${AHEAD}; u++) {
                if (first + u < end) ${PUT % ("combine(before, own[u])", "first + u")};
            }
        }
        carry = combine(carry, shared[${WG_SIZE - 1}]);
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    if (totals && item == 0) carries[(ulong)q * parts + part] = carry;
}
% else:
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void scan(${ARGUMENTS}) {
    const uint part = get_global_id(1);
    const uint first = get_global_id(0) * per;
    const uint last = min(first + per, kept);
    const ulong begin = part * chunk;
    const ulong end = min(length, begin + chunk);
    for (uint q = first; q < last; q++) {
        const ulong base = base_of(x0, q, inner, outer_stride, inner_stride);
        Acc acc = parts > 1 && !totals ? carries[(ulong)q * parts + part] : made(${NOTHING}, 0);
        for (ulong k = begin; k < end; k++) {
            acc = combine(acc, made(${load(IN, "x", "base + k * step")}, k));
            if (!totals) ${PUT % ("acc", "k")};
        }
        if (totals) carries[(ulong)q * parts + part] = acc;
    }
}
% endif

// An item owns the parts of one run.
__kernel void scan_carries(__global Acc *carries, const uint kept, const uint parts) {
    const uint q = get_global_id(0);
    if (q >= kept) return;
    Acc before = made(${NOTHING}, 0);
    for (uint part = 0; part < parts; part++) {
        const Acc total = carries[(ulong)q * parts + part];
        carries[(ulong)q * parts + part] = before;
        before = combine(before, total);
    }
}
