// The ternary weights t of counter codes as char, for the products of whole numbers: as the layer's rows lie, or transposed.
//
// t + 1 is the number of borders, 2C-1 and 2(2C-1), that the code has reached. Launched by memtrain_cl/ops/ternary.py. Constants: NAME (the
// one kernel to render), GPU, C, PACKED, ALIGNED (rows of t begin on whole words), WIDE
// (GPU: rows of the state and of t are whole sixteens of weights and begin on such, in memory too).
<% VECTOR_WIDTHS = (4,) %>
#include "_code6.cl"
#include "_counter_state.cl"

% if PACKED:
% for W in (1, 8):
<% U = "uint" if W == 1 else "uint8" %>
// Four weights to a word, from 6-bit codes in its bytes: adding 128 less the border reaches a byte's highest bit, and carries no further.
inline ${U} ternary_words_${W}(const ${U} codes) {
    const ${U} reached = (codes + ${128 - (2 * C - 1)}u * 0x01010101u >> 7 & 0x01010101u) +
                         (codes + ${128 - 2 * (2 * C - 1)}u * 0x01010101u >> 7 & 0x01010101u);
    // 0, 1, 2 to -1, 0, 1 in each byte, without a borrow.
    return (reached + 0x7f7f7f7fu) ^ 0x80808080u;
}

inline ${U} code_bytes_${W}(const ${U} group) {
    return (group & 0x3fu) | (group << 2 & 0x3f00u) | (group << 4 & 0x3f0000u) | (group << 6 & 0x3f000000u);
}
% endfor
% endif

// Of the columns 4q .. 4q + 3 of a state row of n, as a word. What lies beyond the row's end is no weight.
inline uint ternary_word(const __global uchar *row, const uint q, const uint n) {
% if PACKED:
    return ternary_words_1(code_bytes_1(cc_load_group(row + 3 * (size_t)q)));
% else:
    const uchar4 codes = as_uchar4(load_word_4(row, q, n));
    const char4 t = (char4)(-1) - (codes >= (uchar4)(${2 * C - 1})) - (codes >= (uchar4)(${2 * (2 * C - 1)}));
    return as_uint(t);
% endif
}

inline void store_word(__global char *target, const uint word, const uint left) {
    if (left >= 4) {
        ${"*(__global uint *)target = word" if ALIGNED else "vstore4(as_char4(word), 0, target)"};
        return;
    }
    for (uint i = 0; i < left; i++) target[i] = (char)(word >> 8 * i);
}

% if not GPU:
// Thirty-two weights from column j on.
% if PACKED:
inline void ternary_32(const __global uchar *row, const uint j, uint *words) {
    const __global uchar *bytes = row + j / 4 * 3;
    // The last read ends with the last group.
    const uint8 groups = (uint8)(${", ".join(f"as_uint(vload4(0, bytes + {3 * i}))" for i in range(7))}, as_uint(vload4(0, bytes + 20)) >> 8);
    vstore8(ternary_words_8(code_bytes_8(groups)), 0, words);
}
% else:
inline void ternary_32(const __global uchar *row, const uint j, uint *words) {
    for (uint i = 0; i < 4; i++) {
        const uchar8 codes = vload8(i, row + j);
        vstore8((char8)(-1) - (codes >= (uchar8)(${2 * C - 1})) - (codes >= (uchar8)(${2 * (2 * C - 1)})), i, (char *)words);
    }
}
% endif
% endif

% if WIDE:
// Of the sixteen from `codes` on: a word for each four of them.
inline uint4 ternary_16(const __global uchar *codes) {
% if PACKED:
    const __global uint *words = (const __global uint *)codes;
    const uint a = words[0], b = words[1], c = words[2];
    return (uint4)(${", ".join(f"ternary_words_1(code_bytes_1({group}))" for group in ("a", "a >> 24 | b << 8", "b >> 16 | c << 16", "c >> 8"))});
% else:
    const uchar16 own = as_uchar16(*(const __global uint4 *)codes);
    return as_uint4((char16)(-1) - (own >= (uchar16)(${2 * C - 1})) - (own >= (uchar16)(${2 * (2 * C - 1)})));
% endif
}

% endif
% if NAME == "decode_ternary" and WIDE:
// t char [rows, n]; a work-item makes sixteen. One row is like another.
__kernel __attribute__((reqd_work_group_size(64, 1, 1)))
void decode_ternary(const __global uchar *state, __global char *t, const uint n, const uint rows, const uint per) {
    const size_t i = get_global_id(0);
    if (i < (size_t)rows * (n / 16)) ((__global uint4 *)t)[i] = ternary_16(state + ${12 if PACKED else 16} * i);
}
% elif NAME == "decode_ternary" and GPU:
// t char [rows, n]; a work-item makes four of a row. Items lie row after row.
__kernel void decode_ternary(const __global uchar *state, __global char *t, const uint n, const uint rows, const uint per) {
    const uint groups = (n + 3) / 4;
    const size_t o = get_global_id(0) / groups;
    const uint q = get_global_id(0) - o * groups;
    store_word(t + o * n + 4 * q, ternary_word(state + o * (${ROW_BYTES[PACKED]}), q, n), n - 4 * q);
}
% elif NAME == "decode_ternary":
// t char [rows, n]; a work-item makes `per` rows.
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void decode_ternary(const __global uchar *state, __global char *t, const uint n, const uint rows, const uint per) {
    const size_t first = get_global_id(0) * (size_t)per;
    const size_t last = min(first + per, (size_t)rows);
    for (size_t o = first; o < last; o++) {
        const __global uchar *row = state + o * (${ROW_BYTES[PACKED]});
        __global char *target = t + o * n;
        uint j = 0;
        for (; j + 32 <= n; j += 32) {
            uint words[8];
            ternary_32(row, j, words);
            for (uint i = 0; i < 4; i++) vstore8(vload8(i, (const char *)words), i, target + j);
        }
        for (; j < n; j += 4) store_word(target + j, ternary_word(row, j / 4, n), n - j);
    }
}
% elif WIDE:
// t char [n, rows]; a work-group makes 128 rows of it, 128 long: an item four by sixteen, through local memory.
__kernel __attribute__((reqd_work_group_size(32, 8, 1)))
void decode_ternary_transposed(const __global uchar *state, __global char *t, const uint n, const uint rows, const uint per) {
    // Of a column's eight units of sixteen, the places are swapped by the columns' sixteen: items side by side then write to banks of their own.
    __local uint4 tile[128 * 8];
    const uint item = get_local_id(1) * 32 + get_local_id(0);
    const uint strip = item % 8;
    const uint word = item / 8;
    const uint j0 = get_group_id(0) * 128;
    const uint o0 = get_group_id(1) * 128;
    if (j0 + 16 * strip < n && o0 + 4 * word < rows) {
        const __global uchar *codes = state + (size_t)(o0 + 4 * word) * (${ROW_BYTES[PACKED]}) + ${12 if PACKED else 16} * (size_t)(j0 / 16 + strip);
% for i in range(4):
        uint4 row${i} = ternary_16(codes + ${i} * (size_t)(${ROW_BYTES[PACKED]}));
% endfor
% for apart, bits, mask in ((2, 16, "0x0000ffffu"), (1, 8, "0x00ff00ffu")):
% for i in range(4):
% if not i & apart:
        {
            const uint4 swapped = (row${i} >> ${bits} ^ row${i + apart}) & ${mask};
            row${i + apart} ^= swapped;
            row${i} ^= swapped << ${bits};
        }
% endif
% endfor
% endfor
        __local uint *target = (__local uint *)tile + 512 * strip + (word ^ 4 * strip);
% for q, lane in enumerate("xyzw"):
% for i in range(4):
        target[${32 * (4 * q + i)}] = row${i}.${lane};
% endfor
% endfor
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint unit = item; unit < 128 * 8; unit += 256) {
        const uint c = unit / 8;
        const uint o = o0 + unit % 8 * 16;
        if (j0 + c < n && o < rows) *(__global uint4 *)(t + (size_t)(j0 + c) * rows + o) = tile[unit ^ (c / 16)];
    }
}
% elif GPU:
// t char [n, rows]; a work-group makes 32 rows of it, 128 long, through local memory.
__kernel __attribute__((reqd_work_group_size(32, 2, 1)))
void decode_ternary_transposed(const __global uchar *state, __global char *t, const uint n, const uint rows, const uint per) {
    __local char tile[32 * 132] __attribute__((aligned(16)));
    const uint item = get_local_id(1) * 32 + get_local_id(0);
    const uint j0 = get_group_id(0) * 32;
    const uint o0 = get_group_id(1) * 128;
    for (uint unit = item; unit < 128 * 8; unit += 64) {
        const uint q = unit % 8;
        const size_t o = o0 + unit / 8;
        if (o < rows && j0 + 4 * q < n) {
            const char4 four = as_char4(ternary_word(state + o * (${ROW_BYTES[PACKED]}), j0 / 4 + q, n));
            __local char *target = tile + 132 * 4 * q + unit / 8;
            target[0] = four.x;
            target[132] = four.y;
            target[2 * 132] = four.z;
            target[3 * 132] = four.w;
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint unit = item; unit < 32 * 32; unit += 64) {
        const uint c = unit / 32;
        const uint o = o0 + unit % 32 * 4;
        if (j0 + c < n && o < rows) {
            const __local char *found = tile + 132 * c + unit % 32 * 4;
            __global char *target = t + (size_t)(j0 + c) * rows + o;
            if (o + 4 <= rows) {
                store_word(target, *(const __local uint *)found, 4);
            } else {
                for (uint i = 0; o + i < rows; i++) target[i] = found[i];
            }
        }
    }
}
% else:
// t char [n, rows]; a work-item makes 64 rows of it, `per` long (whole eights): four by four, by swapping ever smaller blocks.
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void decode_ternary_transposed(const __global uchar *state, __global char *t, const uint n, const uint rows, const uint per) {
    const uint j0 = get_global_id(0) * 64;
    const uint j1 = min(j0 + 64, n);
    const size_t first = get_global_id(1) * (size_t)per;
    const size_t last = min(first + per, (size_t)rows);
    uint found[64];
    uint made[64];
    for (uint i = 0; i < 64; i++) found[i] = 0;
    for (size_t o = first; o < last; o += 8) {
        const uint height = (uint)min(last - o, (size_t)8);
        for (uint j = j0; j < j1; j += 32) {
            const uint columns = min(j1 - j, 32u);
            for (uint i = 0; i < height; i++) {
                const __global uchar *row = state + (o + i) * (${ROW_BYTES[PACKED]});
                if (columns == 32) {
                    ternary_32(row, j, found + 8 * i);
                } else {
                    for (uint q = 0; 4 * q < columns; q++) found[8 * i + q] = ternary_word(row, j / 4 + q, n);
                }
            }
% for group in range(2):
            {
% for i in range(4):
                uint8 row${i} = vload8(${4 * group + i}, found);
% endfor
% for apart, bits, mask in ((2, 16, "0x0000ffffu"), (1, 8, "0x00ff00ffu")):
% for i in range(4):
% if not i & apart:
                {
                    const uint8 swapped = (row${i} >> ${bits} ^ row${i + apart}) & ${mask};
                    row${i + apart} ^= swapped;
                    row${i} ^= swapped << ${bits};
                }
% endif
% endfor
% endfor
% for i in range(4):
                vstore8(row${i}, ${4 * group + i}, made);
% endfor
            }
% endfor
            // Lane l of vector i of each four rows holds column 4l + i.
            for (uint c = 0; c < columns; c++) {
                __global char *target = t + (size_t)(j + c) * rows + o;
                const uint place = c % 4 * 8 + c / 4;
                if (height == 8) {
                    vstore8(as_char8((uint2)(made[place], made[place + 32])), 0, target);
                } else {
                    for (uint i = 0; i < height; i++) target[i] = (char)(made[place + i / 4 * 32] >> 8 * (i % 4));
                }
            }
        }
    }
}
% endif
