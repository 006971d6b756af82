<%doc>
Rings of signs and their votes, for kernels/automagic.cl: bytes of WIDTH elements side by side, a plane for each eight signs. Expects GPU, ALIGNED, PTX, PLANES,
and WIDTH and vec of _rows.cl.

voted(signs, ...)    the sign of g enters slot `slot` of WIDTH elements' rings; their votes on w
voted_word(planes, ...)    the same of rings in PLANES words, where PTX and ALIGNED are 1
</%doc>
inline uint${WIDTH} take_bytes(const __global uchar *p, uint left) {
% if GPU and ALIGNED:
    return convert_uint4(*(const __global uchar4 *)p);
% else:
    if (left >= ${WIDTH}) return convert_uint${WIDTH}(vload${WIDTH}(0, p));
    uint own[${WIDTH}];
    for (uint i = 0; i < ${WIDTH}; i++) own[i] = i < left ? p[i] : 0;
    return vload${WIDTH}(0, own);
% endif
}

#include "_bytes.cl"

% if PTX and ALIGNED:
// Four rings in a word, a byte each.
inline vec voted_word(uint *planes, vec g, vec w, uint slot, uint history, bool full) {
    const uint top = (1u << (history - ${8 * (PLANES - 1)})) - 1;
    const uint bit = 0x01010101u << (slot & 7);
    const uint set = (g.x > 0.0f ? 0xffu : 0u) | (g.y > 0.0f ? 0xff00u : 0u) | (g.z > 0.0f ? 0xff0000u : 0u) | (g.w > 0.0f ? 0xff000000u : 0u);
% for b in range(PLANES):
    if (slot / 8 == ${b}) planes[${b}] = (planes[${b}] & ~bit) | (set & bit);
    const uint plane${b} = planes[${b}];
% endfor
    if (!full) return (vec)(0.0f);
    uint all_set = 0xffffffffu, any_set = 0, all_turn = 0xffffffffu;
% for b in range(PLANES):
<%
LAST = b == PLANES - 1
BESIDE = "~(top * 0x01010101u)" if LAST else "0u"
%>
    {
        // Each sign beside the next one's, but for the newest, whose next one is the oldest.
        const uint seam = slot / 8 == ${b} ? bit : 0;
        const uint next = (plane${b} >> 1 & 0x7f7f7f7fu) | (plane${0 if LAST else b + 1} & 0x01010101u) << ${f"(history - {8 * b + 1})" if LAST else "7u"};
        all_set &= plane${b} | ${BESIDE};
        any_set |= plane${b};
        all_turn &= (plane${b} ^ next) | ${BESIDE} | seam;
    }
% endfor
    // 255 in the bytes that are 0: of the bits below the highest no sum carries over.
    const uint all_zero = ~all_set, turn_zero = ~all_turn;
% for name, word in (("alike", "all_zero"), ("unlike", "any_set"), ("turning", "turn_zero")):
    const uint ${name} = ~(((${word} & 0x7f7f7f7fu) + 0x7f7f7f7fu) | ${word}) & 0x80808080u;
% endfor
    // The upper bytes of 1, -1 or 0.
    const uint up = alike | unlike;
    const uint voting = up | turning;
    const uint high = (voting >> 7) * 0x3fu | (turning & ~up);
    const uint4 signed_ones = (uint4)(high << 24 | (voting & 0x80u) << 16, (high & 0xff00u) << 16 | (voting & 0x8000u) << 8,
                                      (high & 0xff0000u) << 8 | (voting & 0x800000u), (high & 0xff000000u) | (voting & 0x80000000u) >> 8);
    return w * as_float4(signed_ones);
}

inline vec voted(__global uchar *signs, ulong n, uint left, vec g, vec w, uint slot, uint history, bool full) {
    uint planes[${PLANES}];
% for b in range(PLANES):
    planes[${b}] = *(const __global uint *)(signs + ${b} * n);
% endfor
    const vec votes = voted_word(planes, g, w, slot, history, full);
% for b in range(PLANES):
    if (slot / 8 == ${b}) *(__global uint *)(signs + ${b} * n) = planes[${b}];
% endfor
    return votes;
}
% else:
// The sign of g enters slot `slot` of the rings of WIDTH elements; the votes on w of those that are full: w where all signs are alike, -w where each
// differs from the one before it. `top` are the last plane's bits, `history` of all.
inline vec voted(__global uchar *signs, ulong n, uint left, vec g, vec w, uint slot, uint history, bool full) {
    const uint top = (1u << (history - ${8 * (PLANES - 1)})) - 1;
% for b in range(PLANES):
    uint${WIDTH} plane${b} = take_bytes(signs${f" + {b} * n" if b else ""}, left);
% endfor
    const uint bit = 1u << (slot & 7);
% for b in range(PLANES):
    if (slot / 8 == ${b}) {
        plane${b} = (plane${b} & ~bit) | (as_uint${WIDTH}(g > 0.0f) & bit);
        put_bytes(signs${f" + {b} * n" if b else ""}, left, plane${b});
    }
% endfor
    if (!full) return (vec)(0.0f);
    uint${WIDTH} all_set = (uint${WIDTH})(255), any_set = (uint${WIDTH})(0), all_turn = (uint${WIDTH})(255);
% for b in range(PLANES):
<%
LAST = b == PLANES - 1
BESIDE = f"(255u & ~top)" if LAST else "0u"
%>
    {
        // Each sign beside the next one's, but for the newest, whose next one is the oldest.
        const uint seam = slot / 8 == ${b} ? bit : 0;
        const uint${WIDTH} next = plane${b} >> 1 | (plane${0 if LAST else b + 1} & 1u) << ${f"(history - {8 * b + 1})" if LAST else "7u"};
        all_set &= plane${b} | ${BESIDE};
        any_set |= plane${b};
        all_turn &= (plane${b} ^ next) | ${BESIDE} | seam;
    }
% endfor
    const int${WIDTH} up = (all_set == 255u) | (any_set == 0u);
    return select(select((vec)(0.0f), -w, all_turn == 255u), w, up);
}
% endif
