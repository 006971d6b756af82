// How a row of counter state lies in memory: four codes at columns 4q..4q+3, in 6-bit or byte storage.
// Needs: PACKED, C, GPU, VECTOR_WIDTHS, _code6.cl.
<%! ROW_BYTES = {0: "n", 1: "n / 4 * 3"} %>

// Four codes as they are stored, in one word: a 24-bit group, or four bytes.
inline uint load_word_4(const __global uchar *row, uint q, uint n) {
% if PACKED:
    return cc_load_group(row + 3 * (size_t)q);
% else:
    const uint j = 4 * q;
    if (j + 4 <= n) return as_uint(vload4(q, row));
    return (uint)row[j] | (j + 1 < n ? (uint)row[j + 1] << 8 : 0u) | (j + 2 < n ? (uint)row[j + 2] << 16 : 0u);
% endif
}

inline uint4 word_codes(uint word) { return ${"cc_unpack4(word)" if PACKED else "convert_uint4(as_uchar4(word))"}; }

// The centred values t*(2C-1) + c of a stored word. The code's bits become the mantissa of 2^23 + code: no conversion.
inline float4 word_centred(uint word) {
    const uint4 places = ${"(uint4)(word, word >> 6, word >> 12, word >> 18)" if PACKED else "(uint4)(word, word >> 8, word >> 16, word >> 24)"};
    return as_float4((places & ${63 if PACKED else 255}u) | 0x4b000000u) - ${float(2**23 + 3 * C - 2)}f;
}

inline uint4 load_codes_4(const __global uchar *row, uint q, uint n) { return word_codes(load_word_4(row, q, n)); }

inline void store_codes_4(__global uchar *row, uint q, uint n, uint4 codes) {
% if PACKED:
    cc_store_group(row + 3 * (size_t)q, cc_pack4(codes));
% else:
    const uint j = 4 * q;
    if (j + 4 <= n) {
        vstore4(convert_uchar4(codes), q, row);
        return;
    }
    row[j] = (uchar)codes.x;
    if (j + 1 < n) row[j + 1] = (uchar)codes.y;
    if (j + 2 < n) row[j + 2] = (uchar)codes.z;
% endif
}

<%def name="centred(codes, width)">(convert_float${width}(as_int${width}(${codes})) - ${3 * C - 2}.0f)</%def>

// a*b + c where fusing cannot change the result (small integers, or a sum that is rounded to one): GPUs fuse in hardware.
#define EXACT_MAD(a, b, c) ${"fma((a), (b), (c))" if GPU else "((a) * (b) + (c))"}

// The codes of centred values.
<%def name="codes_of(centred, width)">as_uint${width}(convert_int${width}(${centred} + ${3 * C - 2}.0f))</%def>

// 1.5 * 2^23: adding and taking it away rounds a small float to the nearest integer on every device.
#define ROUND_MAGIC 12582912.0f

% for W in VECTOR_WIDTHS:
<% S = "" if W == 1 else str(W) %>
inline float${S} code_ternary_${W}(float${S} centred) {
    // centred = t*(2C-1) + c with |c| <= C-1 < (2C-1)/2, so t is the nearest integer to centred/(2C-1).
    return EXACT_MAD(centred, (float${S})(${repr(1.0 / (2 * C - 1))}f), (float${S})(ROUND_MAGIC)) - ROUND_MAGIC;
}
% endfor
