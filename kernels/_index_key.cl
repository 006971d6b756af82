// An index as a key of the stable order; sizes stay below 2^32.
inline uint key_at(const __global ${stored(INDEX)} *index, const ulong at, const ulong size, const int wrap,
                   volatile __global long *faults) {
    return (uint)checked(index[at], size, wrap, faults);
}
