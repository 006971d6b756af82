// The only 6-bit codec: four codes in three bytes, as the 24-bit little-endian number c0 | c1<<6 | c2<<12 | c3<<18.
// cc_pack4/cc_unpack4 work on one group; the *_8 forms on two groups, for CPUs that keep eight codes in a vector.

inline uint4 cc_unpack4(uint group) { return (uint4)(group, group >> 6, group >> 12, group >> 18) & 63u; }

inline uint cc_pack4(uint4 codes) { return codes.s0 | codes.s1 << 6 | codes.s2 << 12 | codes.s3 << 18; }

inline uint cc_load_group(const __global uchar *bytes) {
    return (uint)bytes[0] | (uint)bytes[1] << 8 | (uint)bytes[2] << 16;
}

inline void cc_store_group(__global uchar *bytes, uint group) {
    bytes[0] = (uchar)group;
    bytes[1] = (uchar)(group >> 8);
    bytes[2] = (uchar)(group >> 16);
}

// The code at column j of a packed row.
inline uint cc_unpack_1(const __global uchar *row, uint j) {
    return cc_load_group(row + j / 4 * 3) >> (6 * (j & 3)) & 63u;
}

inline uint8 cc_load_8(const __global uchar *bytes) {
    // Two four-byte reads that stay within the six bytes of the two groups.
    const uint low = as_uint(vload4(0, bytes));
    const uint high = as_uint(vload4(0, bytes + 2)) >> 8;
    const uint8 both = (uint8)(low, low, low, low, high, high, high, high);
    return (both >> (uint8)(0, 6, 12, 18, 0, 6, 12, 18)) & 63u;
}

inline void cc_store_8(__global uchar *bytes, uint8 codes) {
    const uint8 placed = codes << (uint8)(0, 6, 12, 18, 0, 6, 12, 18);
    const uint4 pairs = placed.even | placed.odd;
    const uint2 groups = pairs.even | pairs.odd;
    vstore4(as_uchar4(groups.s0 | groups.s1 << 24), 0, bytes);
    vstore2(as_uchar4(groups.s1 >> 8).s01, 0, bytes + 4);
}
