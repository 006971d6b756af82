// The stable order of long lists of indices, eight bits of the keys a pass: count_digits, scan_counts, move_digits.

// keys[i] = index[i], checked. A work-item owns an element.
__kernel void plan_keys(const __global ${stored(INDEX)} *index, const ulong index0, __global uint *keys,
                        volatile __global long *faults, const ulong size, const int wrap, const uint n) {
    const uint i = get_global_id(0);
    if (i < n) keys[i] = key_at(index, index0 + i, size, wrap, faults);
}

// counts uint [256, chunks]: how often each digit (eight bits of a key from `shift`) occurs in each chunk of `chunk` keys.
% if GPU:
__kernel __attribute__((reqd_work_group_size(${WG_SIZE}, 1, 1)))
void count_digits(const __global uint *keys, __global uint *counts, const uint n, const uint chunk, const uint chunks,
                  const uint shift) {
    __local uint count[256];
    const uint lid = get_local_id(0);
    const uint begin = get_group_id(0) * chunk;
    const uint end = min(n - begin, chunk) + begin;
    for (uint d = lid; d < 256; d += ${WG_SIZE}) count[d] = 0;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint i = begin + lid; i < end; i += ${WG_SIZE}) atomic_inc(&count[keys[i] >> shift & 255u]);
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint d = lid; d < 256; d += ${WG_SIZE}) counts[d * chunks + get_group_id(0)] = count[d];
}
% else:
__kernel void count_digits(const __global uint *keys, __global uint *counts, const uint n, const uint chunk,
                           const uint chunks, const uint shift) {
    uint count[256];
    const uint begin = get_global_id(0) * chunk;
    const uint end = min(n - begin, chunk) + begin;
    for (uint d = 0; d < 256; d++) count[d] = 0;
    for (uint i = begin; i < end; i++) count[keys[i] >> shift & 255u]++;
    for (uint d = 0; d < 256; d++) counts[d * chunks + get_global_id(0)] = count[d];
}
% endif

// Each key to its digit's place: counts, summed up by scan_counts, say where a chunk's keys of a digit begin.
// order is read as 0, 1, 2 ... where `first`. A work-group, or on a CPU a work-item, owns a chunk.
% if GPU:
__kernel __attribute__((reqd_work_group_size(${WG_SIZE}, 1, 1)))
void move_digits(const __global uint *keys, const __global uint *order, __global uint *to_keys, __global uint *to_order,
                 const __global uint *counts, const uint n, const uint chunk, const uint chunks, const uint shift,
                 const int first) {
    __local uint place[256];
    __local uint digits[${WG_SIZE}];
    const uint lid = get_local_id(0);
    const uint begin = get_group_id(0) * chunk;
    const uint end = min(n - begin, chunk) + begin;
    for (uint d = lid; d < 256; d += ${WG_SIZE}) place[d] = counts[d * chunks + get_group_id(0)];
    for (uint base = begin; base < end; base += ${WG_SIZE}) {
        const uint i = base + lid;
        const uint key = i < end ? keys[i] : 0;
        const uint digit = i < end ? key >> shift & 255u : 256u;
        digits[lid] = digit;
        barrier(CLK_LOCAL_MEM_FENCE);
        uint before = 0;
        uint after = 0;
        #pragma unroll 16
        for (uint t = 0; t < ${WG_SIZE}; t++) {
            before += digits[t] == digit && t < lid;
            after += digits[t] == digit && t > lid;
        }
        const uint to = digit < 256 ? place[digit] + before : 0;
        barrier(CLK_LOCAL_MEM_FENCE);
        if (digit < 256) {
            if (after == 0) place[digit] = to + 1;
            to_keys[to] = key;
            to_order[to] = first ? i : order[i];
        }
    }
}
% else:
__kernel void move_digits(const __global uint *keys, const __global uint *order, __global uint *to_keys,
                          __global uint *to_order, const __global uint *counts, const uint n, const uint chunk,
                          const uint chunks, const uint shift, const int first) {
    uint place[256];
    const uint begin = get_global_id(0) * chunk;
    const uint end = min(n - begin, chunk) + begin;
    for (uint d = 0; d < 256; d++) place[d] = counts[d * chunks + get_global_id(0)];
    for (uint i = begin; i < end; i++) {
        const uint key = keys[i];
        const uint to = place[key >> shift & 255u]++;
        to_keys[to] = key;
        to_order[to] = first ? i : order[i];
    }
}
% endif
