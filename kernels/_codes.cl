<%doc>
Codes of few bits in memory, a vector of WIDTH as numbers at a time. Expects GPU, ALIGNED (GPU: rows begin on four elements) and CODES:
"int8", "uint8", "int16", or "int4", two codes in a byte, lo | hi << 4, each as code + 8; its rows have an even length.

put_codes(p, at, left, codes)    writes the first `left` of them as elements at, at + 1, ... of p; where ALIGNED all of them
put_whole(p, at, left, codes)    the same of integers, but for int4, of which the low bits count
take_codes(p, at, left)          reads them
</%doc>
<%
WIDTH = 4 if GPU else 8
CODE = {"int8": "char", "uint8": "uchar", "int16": "short", "int4": "uchar"}[CODES]
%>
// Added to a small whole number, it leaves that in two's complement in the low bits.
#define WHOLE_MAGIC 12582912.0f

// Of eight bytes the low halves: code + 8 of codes of four bits.
inline ulong to_nibbles(ulong codes) { return (codes & 0x0f0f0f0f0f0f0f0fUL) ^ 0x0808080808080808UL; }

// Eight bytes below 16 as four bytes, by halves, and back.
inline uint draw_together(ulong word) {
    word = (word | word >> 4) & 0x00ff00ff00ff00ffUL;
    word = (word | word >> 8) & 0x0000ffff0000ffffUL;
    return (uint)(word | word >> 16);
}

inline ulong draw_apart(uint packed) {
    ulong word = packed;
    word = (word | word << 16) & 0x0000ffff0000ffffUL;
    word = (word | word << 8) & 0x00ff00ff00ff00ffUL;
    return (word | word << 4) & 0x0f0f0f0f0f0f0f0fUL;
}

% if CODES != "int4":
inline void put_whole(__global ${CODE} *p, ulong at, uint left, int${WIDTH} codes) {
    p += at;
% if GPU and ALIGNED:
    *(__global ${CODE}4 *)p = convert_${CODE}4(codes);
% else:
    if (left >= ${WIDTH}) {
        vstore${WIDTH}(convert_${CODE}${WIDTH}(codes), 0, p);
        return;
    }
    int own[${WIDTH}];
    vstore${WIDTH}(codes, 0, own);
    for (uint i = 0; i < left; i++) p[i] = (${CODE})own[i];
% endif
}

% endif
inline void put_codes(__global ${CODE} *p, ulong at, uint left, float${WIDTH} codes) {
% if CODES == "int4":
    const uint${WIDTH} bits = as_uint${WIDTH}(codes + (WHOLE_MAGIC + 8.0f)) & 15u;
    p += at / 2;
% if GPU:
    const uchar2 two = (uchar2)((uchar)(bits.x | bits.y << 4), (uchar)(bits.z | bits.w << 4));
% if ALIGNED:
    *(__global uchar2 *)p = two;
% else:
    p[0] = two.x;
    if (left >= 4) p[1] = two.y;
% endif
% else:
    const uint packed = draw_together(as_ulong(convert_uchar8(bits)));
    if (left >= 8) {
        vstore4(as_uchar4(packed), 0, p);
    } else {
        for (uint i = 0; 2 * i < left; i++) p[i] = (uchar)(packed >> 8 * i);
    }
% endif
% else:
    put_whole(p, at, left, as_int${WIDTH}(codes + WHOLE_MAGIC));
% endif
}

inline float${WIDTH} take_codes(const __global ${CODE} *p, ulong at, uint left) {
% if CODES == "int4":
    p += at / 2;
% if GPU and ALIGNED:
    const uchar2 two = *(const __global uchar2 *)p;
    const uint4 bits = (uint4)(two.x, two.x >> 4, two.y, two.y >> 4) & 15u;
    return convert_float4(as_int4(bits)) - 8.0f;
% else:
% if not GPU:
    if (left >= 8) return convert_float8(as_char8(draw_apart(as_uint(vload4(0, p)))) - (char8)(8));
% endif
    float own[${WIDTH}];
    for (uint i = 0; i < ${WIDTH // 2}; i++) {
        const int both = 2 * i < left ? p[i] : 0;
        own[2 * i] = (float)((both & 15) - 8);
        own[2 * i + 1] = (float)((both >> 4) - 8);
    }
    return vload${WIDTH}(0, own);
% endif
% else:
    p += at;
% if GPU and ALIGNED:
    return convert_float4(*(const __global ${CODE}4 *)p);
% else:
    if (left >= ${WIDTH}) return convert_float${WIDTH}(vload${WIDTH}(0, p));
    float own[${WIDTH}];
    for (uint i = 0; i < ${WIDTH}; i++) own[i] = i < left ? (float)p[i] : 0.0f;
    return vload${WIDTH}(0, own);
% endif
% endif
}
