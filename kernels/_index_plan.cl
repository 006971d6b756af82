// The stable order of indices: keys ascending, and for each the place where it stood, so that equal keys keep their order.
// Short lists take one launch here; long ones a radix sort (_index_radix.cl).

// keys, order uint [n]; spare uint [2, n] is read by the CPU's shape alone, as is `passes`, the digits that a key has.
% if GPU:
// A work-item ranks one key among all, which pass by in local memory.
__kernel __attribute__((reqd_work_group_size(${WG_SIZE}, 1, 1)))
void plan_short(const __global ${stored(INDEX)} *index, const ulong index0, __global uint *keys, __global uint *order,
                __global uint *spare, volatile __global long *faults, const ulong size, const int wrap, const uint n,
                const uint passes) {
    __local uint tile[${4 * WG_SIZE}];
    const uint lid = get_local_id(0);
    const uint first = get_group_id(0) * ${WG_SIZE};
    const uint i = first + lid;
    const uint mine = i < n ? key_at(index, index0 + i, size, wrap, faults) : 0;
    uint rank = 0;
    for (uint base = 0; base < n; base += ${4 * WG_SIZE}) {
        barrier(CLK_LOCAL_MEM_FENCE);
        #pragma unroll
        for (uint u = 0; u < 4; u++) {
            const uint at = base + ${WG_SIZE} * u + lid;
            // Beyond the end nothing is smaller than a key, and nothing equal stands before it.
            tile[${WG_SIZE} * u + lid] = at < n ? key_at(index, index0 + at, size, wrap, faults) : 0xffffffffu;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        if (base + ${4 * WG_SIZE} <= first) {
            #pragma unroll 16
            for (uint t = 0; t < ${4 * WG_SIZE}; t++) rank += tile[t] <= mine;
        } else if (base > first) {
            #pragma unroll 16
            for (uint t = 0; t < ${4 * WG_SIZE}; t++) rank += tile[t] < mine;
        } else {
            #pragma unroll 16
            for (uint t = 0; t < ${4 * WG_SIZE}; t++) rank += tile[t] < mine || (tile[t] == mine && base + t < i);
        }
    }
    if (i < n) {
        keys[rank] = mine;
        order[rank] = i;
    }
}
% else:
// One work-item sorts all: short lists are not worth a second one.
__kernel void plan_short(const __global ${stored(INDEX)} *index, const ulong index0, __global uint *keys,
                         __global uint *order, __global uint *spare, volatile __global long *faults, const ulong size,
                         const int wrap, const uint n, const uint passes) {
    // The last pass ends in keys and order.
    __global uint *from_keys = passes & 1 ? spare : keys;
    __global uint *from_order = passes & 1 ? spare + n : order;
    __global uint *to_keys = passes & 1 ? keys : spare;
    __global uint *to_order = passes & 1 ? order : spare + n;
    for (uint i = 0; i < n; i++) {
        from_keys[i] = key_at(index, index0 + i, size, wrap, faults);
        from_order[i] = i;
    }
    for (uint shift = 0; shift < 8 * passes; shift += 8) {
        uint place[256];
        for (uint d = 0; d < 256; d++) place[d] = 0;
        for (uint i = 0; i < n; i++) place[from_keys[i] >> shift & 255u]++;
        uint before = 0;
        for (uint d = 0; d < 256; d++) {
            const uint count = place[d];
            place[d] = before;
            before += count;
        }
        for (uint i = 0; i < n; i++) {
            const uint key = from_keys[i];
            const uint to = place[key >> shift & 255u]++;
            to_keys[to] = key;
            to_order[to] = from_order[i];
        }
        __global uint *keys_between = from_keys;
        __global uint *order_between = from_order;
        from_keys = to_keys;
        from_order = to_order;
        to_keys = keys_between;
        to_order = order_between;
    }
}
% endif

// out[i] = order[i], as a tensor's numbers.
__kernel void write_order(const __global uint *order, __global ${stored(T)} *out, const ulong out0, const uint n) {
    const uint i = get_global_id(0);
    if (i < n) ${store(T, "out", "out0 + i", "order[i]")};
}

// out[i] = out[i]*size + index[i], checked; out is read as 0 where `first`. The place of several indices in their joint
// dimensions.
__kernel void join_index(const __global ${stored(INDEX)} *index, const ulong index0, __global long *out,
                         volatile __global long *faults, const ulong size, const int wrap, const int first, const uint n) {
    const uint i = get_global_id(0);
    if (i < n) out[i] = (first ? 0 : out[i] * (long)size) + checked(index[index0 + i], size, wrap, faults);
}

// out[o, k, i] = (o*size + index[o, k, i])*inner + i: where an element of a scatter goes in its flat target.
__kernel void flat_targets(const __global ${stored(INDEX)} *index, const ulong index0, __global long *out,
                           volatile __global long *faults, const ulong size, const uint count, const uint inner,
                           const uint n) {
    const uint at = get_global_id(0);
    if (at >= n) return;
    const uint fibre = at / inner;
    const uint i = at - fibre * inner;
    out[at] = ((fibre / count) * size + checked(index[index0 + at], size, 0, faults)) * inner + i;
}
