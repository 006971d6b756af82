// GPU shape: a work-group of SIDE x SIDE items computes a TILE x TILE block, an item TILE/SIDE x TILE/SIDE of it. Tiles of DEPTH cells of
// rows of a and of b wait in local memory, transposed. A cell is a float of one element of K, or for "dot" a word of four. A block of K
// (`block` elements, a multiple of a tile's) ends where float sums could leave 2^24.
<%
DOT = KIND == "dot"
PER = TILE // SIDE
PITCH = TILE + 4
UNIT = 4 if DOT else 1
# Words of four elements that a tile holds of a row, and that an item loads of each operand's tile.
WORDS = DEPTH * UNIT // 4
LOADS = TILE * WORDS // (SIDE * SIDE)
CELL = "uint" if DOT else "float"
SUM = "int4" if DOT else "float4"
%>
// Four elements as a word, and zeros for what lies beyond the end of a row. aligned: p lies on a word.
inline uint word_of(const __global char *p, const uint left, const uint aligned) {
    if (left >= 4) return aligned ? *(const __global uint *)p : as_uint(vload4(0, p));
    return (uint)(uchar)p[0] | (left > 1 ? (uint)(uchar)p[1] << 8 : 0u) | (left > 2 ? (uint)(uchar)p[2] << 16 : 0u);
}

// Up to four neighbouring sums of a block to their place.
inline void put_4(int4 sums, __global int *target, const __global float *col, const float own, const uint left, const uint scales,
                  const bool first, const bool last) {
    if (left >= 4) {
        ${due("sums", "vload4(0, target)", "vload4(0, col)", "4")}
        vstore4(sums, 0, target);
        return;
    }
    int each[4];
    vstore4(sums, 0, each);
    for (uint i = 0; i < left; i++) {
        int sum = each[i];
        ${due("sum", "target[i]", "col[i]", "")}
        target[i] = sum;
    }
}

<%def name="load_tile(tile, p, ld, first, rows)">
            {
                const uint r = unit / ${WORDS};
                const uint w = unit % ${WORDS};
                uint word = 0;
                const uint k = k0 + 4 * w;
                if (${first} + r < ${rows} && k < k_last) word = word_of(${p} + (size_t)(${first} + r) * ${ld} + k, k_last - k, aligned);
% if DOT:
                ${tile}[w * ${PITCH} + r] = word;
% else:
                const float4 four = convert_float4(as_char4(word));
                ${tile}[(4 * w) * ${PITCH} + r] = four.x;
                ${tile}[(4 * w + 1) * ${PITCH} + r] = four.y;
                ${tile}[(4 * w + 2) * ${PITCH} + r] = four.z;
                ${tile}[(4 * w + 3) * ${PITCH} + r] = four.w;
% endif
            }
</%def>
__kernel __attribute__((reqd_work_group_size(${SIDE}, ${SIDE}, 1)))
void matmul_int8(${parameters()}, const uint block, const uint aligned) {
    __local ${CELL} tile_a[${DEPTH * PITCH}] __attribute__((aligned(16)));
    __local ${CELL} tile_b[${DEPTH * PITCH}] __attribute__((aligned(16)));
    // A closed gate runs through nothing: a return before barriers is more than some compilers can do.
    const uint deep = gated && gate[2] == 0 ? 0 : K;
    const uint x = get_local_id(0);
    const uint y = get_local_id(1);
    const uint item = y * ${SIDE} + x;
    const uint n0 = get_group_id(0) * ${TILE};
    const uint m0 = get_group_id(1) * ${TILE};
    a += a0;
    b += b0;
    for (uint k_first = 0; k_first < deep; k_first += block) {
        const uint k_last = min(K - k_first, block) + k_first;
        const bool first = k_first == 0;
        const bool last = k_last == K;
% for i in range(PER):
% for v in range(PER // 4):
        ${SUM} sum${i}_${v} = (${SUM})(0);
% endfor
% endfor
        for (uint k0 = k_first; k0 < k_last; k0 += ${DEPTH * UNIT}) {
            #pragma unroll
            for (uint load = 0; load < ${LOADS}; load++) {
                const uint unit = item + ${SIDE * SIDE} * load;
                ${load_tile("tile_a", "a", "lda", "m0", "M")}
                ${load_tile("tile_b", "b", "ldb", "n0", "N")}
            }
            barrier(CLK_LOCAL_MEM_FENCE);
            #pragma unroll
            for (uint k = 0; k < ${DEPTH}; k++) {
% for v in range(PER // 4):
                // Vectors of an item lie 4 * SIDE apart, so that neighbouring items read neighbouring words.
                const ${CELL}4 left${v} = *(const __local ${CELL}4 *)(tile_a + k * ${PITCH} + ${4 * SIDE * v} + 4 * y);
                const ${CELL}4 right${v} = *(const __local ${CELL}4 *)(tile_b + k * ${PITCH} + ${4 * SIDE * v} + 4 * x);
% endfor
% for i in range(PER):
% for v in range(PER // 4):
% if DOT:
% for e in range(4):
                sum${i}_${v}.s${e} += dot_4x8packed_ss_int(left${i // 4}.s${i % 4}, right${v}.s${e});
% endfor
% else:
                sum${i}_${v} += left${i // 4}.s${i % 4} * right${v};
% endif
% endfor
% endfor
            }
            barrier(CLK_LOCAL_MEM_FENCE);
        }
% for i in range(PER):
        {
            const uint m = m0 + ${4 * SIDE * (i // 4)} + 4 * y + ${i % 4};
            if (m < M) {
                __global int *target = out + (size_t)m * N;
                const float own = scales ? row[row0 + m] : 1.0f;
% for v in range(PER // 4):
                {
                    const uint n = n0 + ${4 * SIDE * v} + 4 * x;
                    const int4 sums = ${f"sum{i}_{v}" if DOT else f"convert_int4(sum{i}_{v})"};
                    if (n < N) put_4(sums, target + n, col + n, own, N - n, scales, first, last);
                }
% endfor
            }
        }
% endfor
    }
}
