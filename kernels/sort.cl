// Stable sorting along a dimension of a strided tensor, by pairs of a key and a place, which are never equal.
//
//   sort_tiles    pairs[(q*tiles + t)*size + i] = the first `size` in order of the tile's elements x[x0 + base(q) + k*step],
//                 t*tile <= k < (t+1)*tile; beyond the run's end stand pairs greater than all
//   sort_merge    runs of `size` pairs become half as many of `merged`: the first of what two of them hold together
//   sort_finish   the first `taken` pairs of each run become values and places, at (q / after * taken + i) * after + q % after
//   base(q) = q / inner * outer_stride + q % inner * inner_stride,  q < kept
//
// Keys order as the elements do: NaN is the greatest, -0 equals 0; `descending` turns them round, and places still ascend
// among equals. Constants: GPU (a work-group of WG_SIZE items sorts a tile of up to TILE pairs in local memory) or not (a work-item
// sorts a tile of 16 * 4^j pairs with a second buffer of them, or where `size` is less picks that many from a tile of any length);
// IN, the element type, of ITEMSIZE bytes. Launched by memtrain_cl/launchers/sort.py.
<%
WIDE = IN == "int64"
BITS = {1: "uchar", 2: "ushort", 4: "uint", 8: "ulong"}[ITEMSIZE]
%>
#include "_types.cl"

% if WIDE:
typedef struct {
    ulong key;
    ulong place;
} Pair;

inline bool before(const Pair a, const Pair b) { return a.key < b.key || (a.key == b.key && a.place < b.place); }
inline ulong place_of(const Pair pair) { return pair.place; }
inline Pair last_of_all(void) {
    Pair pair = {ULONG_MAX, ULONG_MAX};
    return pair;
}
inline Pair pair_of(const long x, const ulong place, const uint descending) {
    const ulong key = as_ulong(x) ^ 0x8000000000000000ul;
    Pair pair = {descending ? ~key : key, place};
    return pair;
}
% else:
typedef ulong Pair;

inline bool before(const Pair a, const Pair b) { return a < b; }
inline ulong place_of(const Pair pair) { return pair & 0xfffffffful; }
inline Pair last_of_all(void) { return ULONG_MAX; }
inline Pair pair_of(const ${compute(IN)} x, const ulong place, const uint descending) {
% if compute(IN) == "float":
    // By bits alone: comparisons may take subnormal numbers for 0.
    const uint bits = as_uint(x);
    const uint size = bits & 0x7fffffffu;
    const uint key = size > 0x7f800000u ? 0xffffffffu : size == 0 ? 0x80000000u : bits == size ? bits | 0x80000000u : ~bits;
% else:
    const uint key = as_uint(x) ^ 0x80000000u;
% endif
    return (ulong)(descending ? ~key : key) << 32 | place;
}
% endif

// out[i], first <= i < last, of a[0 .. size) and b[0 .. size) merged: how many of the first `first` come from a is searched for.
inline void merge_slice(const __global Pair *a, const __global Pair *b, const ulong size, __global Pair *out, const ulong first,
                        const ulong last) {
    // (Not from first - size on: compilers make a saturating subtraction of it, which Oclgrind does not know.)
    ulong low = 0;
    ulong high = min(first, size);
    while (low < high) {
        const ulong middle = (low + high) / 2;
        if (first - 1 - middle < size && before(b[first - 1 - middle], a[middle])) high = middle;
        else low = middle + 1;
    }
    ulong i = low;
    ulong j = first - low;
    for (ulong k = first; k < last; k++) {
        const bool from_b = i >= size || (j < size && before(b[j], a[i]));
        out[k] = from_b ? b[j++] : a[i++];
    }
}

<%
ARGUMENTS = (
    f"const __global {stored(IN)} *x, const ulong x0, __global Pair *pairs, __global Pair *spare, const uint kept, "
    "const uint inner, const ulong outer_stride, const ulong inner_stride, const ulong step, const uint length, "
    "const uint tiles, const uint tile, const uint size, const uint descending"
)
%>
<%def name="locate()">
    const uint q = (uint)(work / tiles);
    const uint begin = (uint)(work - (ulong)q * tiles) * tile;
    const uint row = q / inner;
    const ulong base = x0 + row * outer_stride + (q - row * inner) * inner_stride;
</%def>
<%
PAIR = "k < length ? pair_of(" + load(IN, "x", "base + k * step") + ", k, descending) : last_of_all()"
%>
% if GPU:
__kernel __attribute__((reqd_work_group_size(${WG_SIZE}, 1, 1)))
void sort_tiles(${ARGUMENTS}) {
    __local Pair held[${TILE}];
    const uint item = get_local_id(0);
    const ulong work = get_group_id(0);
    ${locate()}
    for (uint i = item; i < tile; i += ${WG_SIZE}) {
        const ulong k = (ulong)begin + i;
        held[i] = ${PAIR};
    }
    // Bitonic: blocks of `block` pairs ascend and descend in turn.
    for (uint block = 2; block <= tile; block *= 2) {
        for (uint apart = block / 2; apart > 0; apart /= 2) {
            barrier(CLK_LOCAL_MEM_FENCE);
            for (uint t = item; t < tile / 2; t += ${WG_SIZE}) {
                const uint i = 2 * t - (t & apart - 1);
                const Pair low = held[i];
                const Pair high = held[i + apart];
                if (before(high, low) == ((i & block) == 0)) {
                    held[i] = high;
                    held[i + apart] = low;
                }
            }
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint i = item; i < size; i += ${WG_SIZE}) pairs[work * size + i] = held[i];
}
% else:
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void sort_tiles(${ARGUMENTS}) {
    const ulong work = get_global_id(0);
    ${locate()}
    __global Pair *from = pairs + work * size;
    __global Pair *to = spare + work * size;
    if (size < tile) {
        for (uint i = 0; i < tile; i++) {
            const ulong k = (ulong)begin + i;
            const Pair pair = ${PAIR};
            if (i >= size && !before(pair, from[size - 1])) continue;
            uint j = min(i, size - 1);
            for (; j > 0 && before(pair, from[j - 1]); j--) from[j] = from[j - 1];
            from[j] = pair;
        }
        return;
    }
    for (uint i = 0; i < tile; i++) {
        // Insertion into blocks of sixteen, then merges to and fro, an even number of times.
        const ulong k = (ulong)begin + i;
        const Pair pair = ${PAIR};
        uint j = i;
        for (; (j & 15) && before(pair, from[j - 1]); j--) from[j] = from[j - 1];
        from[j] = pair;
    }
    for (uint run = 16; run < tile; run *= 2) {
        for (uint i = 0; i < tile; i += 2 * run) merge_slice(from + i, from + i + run, run, to + i, 0, 2 * run);
        __global Pair *other = from;
        from = to;
        to = other;
    }
}
% endif

// An item writes up to `slice` pairs of one merged run; `slices` items make a run.
__kernel void sort_merge(const __global Pair *pairs, __global Pair *target, const uint kept, const uint runs, const uint size,
                         const uint merged, const uint slice, const uint slices) {
    const ulong work = get_global_id(0);
    const uint halves = (runs + 1) / 2;
    if (work >= (ulong)kept * halves * slices) return;
    const ulong run = work / slices;
    const ulong first = (work - run * slices) * slice;
    const ulong last = min(first + slice, (ulong)merged);
    const uint q = (uint)(run / halves);
    const uint left = 2 * (uint)(run - (ulong)q * halves);
    const __global Pair *a = pairs + ((ulong)q * runs + left) * size;
    __global Pair *out = target + run * merged;
    if (left + 1 < runs) {
        merge_slice(a, a + size, size, out, first, last);
    } else {
        for (ulong k = first; k < last; k++) out[k] = k < size ? a[k] : last_of_all();
    }
}

// An item owns one result.
__kernel void sort_finish(const __global Pair *pairs, const __global ${BITS} *x, const ulong x0, __global ${BITS} *values,
                          const ulong values0, __global long *places, const ulong places0, const uint kept, const uint inner,
                          const ulong outer_stride, const ulong inner_stride, const ulong step, const uint after,
                          const uint size, const uint taken) {
    const ulong work = get_global_id(0);
    if (work >= (ulong)kept * taken) return;
    const uint q = (uint)(work / taken);
    const uint i = (uint)(work - (ulong)q * taken);
    const uint row = q / inner;
    const ulong base = x0 + row * outer_stride + (q - row * inner) * inner_stride;
    const ulong k = place_of(pairs[(ulong)q * size + i]);
    const uint ahead = q / after;
    const ulong at = ((ulong)ahead * taken + i) * after + (q - ahead * after);
    values[values0 + at] = x[base + k * step];
    places[places0 + at] = (long)k;
}
