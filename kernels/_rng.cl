// Counter-based random numbers: a 32-bit hash of (seed, stream, element), never of work-group shape or global state.
// hash_u32 is the published mixer; uniform01(x) = (hash_u32(x) & 0xffffff) / 2^24 is exact in float32.
// Needs: VECTOR_WIDTHS, the vector widths for which the functions are made (1 means scalar).

% for W in VECTOR_WIDTHS:
<% S = "" if W == 1 else str(W) %>
// The hash up to its last step, which is x ^= x >> 16.
inline uint${S} hash_head_${W}(uint${S} x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x;
}

inline uint${S} hash_u32_${W}(uint${S} x) {
    x = hash_head_${W}(x);
    return x ^ x >> 16;
}

// hash_u32(seed ^ hash_u32(i)) from head = hash_head(i) and mixed = seed ^ seed >> 16, and uniform01 of the same. The inner hash's last step
// and the outer one's first cancel: with z = seed ^ head ^ head>>16, z ^ z>>16 is head ^ seed ^ seed>>16.
inline uint${S} uniform_bits_${W}(uint${S} head, uint mixed) {
    uint${S} x = head ^ mixed;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ x >> 16;
}

inline float${S} uniform_of_${W}(uint${S} head, uint mixed) {
    // Through a signed integer: the value has 24 bits, and CPUs convert signed lanes in one instruction.
    return convert_float${S}(as_int${S}(uniform_bits_${W}(head, mixed) & 0xffffffu)) * 5.9604644775390625e-8f;
}
% endfor

// The hash that enters an element's own: elements beyond 2^32 mix the upper half of their index in.
inline uint index_salt(uint high) { return hash_u32_1(high); }
