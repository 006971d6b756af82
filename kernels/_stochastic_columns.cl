// Kernels of kernels/stochastic.cl over rows whose elements lie `inner` > 1 apart. A column q, of outer * inner, is such a row; neighbours
// lie side by side. GPU: groups of 32 by DEEP work-items, each over STEP columns (four where ALIGNED) and a chunk of `length`. CPU:
// stretches of the memory's own rows in vectors of eight.
<%
COLUMNS_KERNEL = NAME
STEP = 4 if GPU and ALIGNED else 1
CODE = {"int8": "char", "int16": "short", "int4": "uchar"}[CODES]
ARGUMENTS = {
    "absmax_columns": f"{SOURCE}, {FACTORS}__global uint *parts",
    "scaled_columns": f"{SOURCE}, {FACTORS}const {SCALES}, __global {CODE} *codes",
    "scaled_transposed": f"{SOURCE}, {FACTORS}const {SCALES}, __global {CODE} *codes",
    "dequantize_columns": f"const __global {CODE} *codes, const {SCALES}, __global {stored(X)} *y",
}[NAME]
CHANCE = ", const float levels, const uint seed, const ulong base" if NAME.startswith("scaled") else ""
FACTOR = " * multiplier[l]" if MULTIPLIED else ""
TILE_ROWS, TILE_COLUMNS = (128, 32) if GPU else (64, 128)
%>
% if GPU and NAME != "scaled_transposed":
__kernel __attribute__((reqd_work_group_size(32, ${DEEP}, 1)))
void ${COLUMNS_KERNEL}(${ARGUMENTS}, const ulong inner, const ulong columns, const uint length, const uint chunk${CHANCE}) {
    const uint lane = get_local_id(0);
    const uint deep = get_local_id(1);
    const ulong q = ${STEP} * (ulong)get_global_id(0);
    const uint begin = get_group_id(1) * chunk;
    const uint end = min(begin + chunk, length);
    const uint within = q < columns;
    const ulong outer = within ? q / inner : 0;
    const ulong first = outer * length * inner + (q - outer * inner);
% if NAME == "absmax_columns":
    uint4 most = (uint4)(0);
    if (within) {
        const __global ${stored(X)} *source = x + x0 + first;
        #pragma unroll 4
        for (uint l = begin + deep; l < end; l += ${DEEP}) {
            most = max(most, magnitudes(${f"load_{X}(source + l * inner)" if STEP == 4 else f"(float4)({load(X, 'source', 'l * inner')})"}${FACTOR}));
        }
    }
    __local uint4 scratch[${32 * DEEP}];
    scratch[32 * deep + lane] = most;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (deep == 0 && within) {
        for (uint i = 1; i < ${DEEP}; i++) most = max(most, scratch[32 * i + lane]);
        __global uint *target = parts + get_group_id(1) * columns + q;
        ${"vstore4(most, 0, target);" if STEP == 4 else "*target = most.x;"}
    }
% else:
    if (!within) return;
    const float4 own_scale = ${"vload4(0, scale + q)" if STEP == 4 else "(float4)(scale[q])"};
% if NAME == "scaled_columns":
    const float4 divisor = (float4)(${", ".join(f"divisor_of(own_scale.{e})" for e in "xyzw")});
    const uint4 least = (uint4)(${", ".join(f"least_of(own_scale.{e})" for e in "xyzw")});
    const uint mixed = seed ^ seed >> 16;
% endif
    #pragma unroll 4
    for (uint l = begin + deep; l < end; l += ${DEEP}) {
        const ulong at = first + l * inner;
% if NAME == "scaled_columns":
        const float4 v = ${f"load_{X}(x + x0 + at)" if STEP == 4 else f"(float4)({load(X, 'x', 'x0 + at')})"}${FACTOR};
        put_codes(codes, at, ${STEP}, codes_of(v, divisor, least, heads_at(base + at), mixed, levels));
% else:
        store_left_${X}(y + at, ${STEP}, take_codes(codes, at, ${STEP}) * own_scale);
% endif
    }
% endif
}
% elif GPU:
// A group takes ${TILE_COLUMNS} columns and ${TILE_ROWS} of the length: codes of four neighbours of a column make a word of a tile in local
// memory, which leaves along the columns. ALIGNED: the length is whole words.
__kernel __attribute__((reqd_work_group_size(32, ${DEEP}, 1)))
void scaled_transposed(${ARGUMENTS}, const ulong inner, const ulong columns, const uint length, const uint chunk${CHANCE}) {
    __local uint tile[32 * 33];
    const uint lane = get_local_id(0);
    const uint deep = get_local_id(1);
    // Groups lie along one dimension, the only one of which GPUs take any number.
    const size_t strips = (inner + 31) / 32;
    const size_t block = get_group_id(0) / strips;
    const ulong q0 = (get_group_id(0) - block * strips) * 32;
    const ulong q = q0 + lane;
    const uint begin = (uint)block * ${TILE_ROWS};
    if (q < columns) {
        const float own_scale = scale[q];
        const float4 divisor = (float4)(divisor_of(own_scale));
        const uint4 least = (uint4)(least_of(own_scale));
        const uint mixed = seed ^ seed >> 16;
        for (uint word = deep; word < 32; word += ${DEEP}) {
            const uint l = begin + 4 * word;
            if (l < length) {
                const ulong at = l * inner + q;
% for e in range(4):
                const float v${e} = ${"" if e == 0 else f"l + {e} >= length ? 0.0f : "}${load(X, "x", f"x0 + at + {e} * inner")}${f" * multiplier[l + {e}]" if MULTIPLIED else ""};
% endfor
                const float4 v = (float4)(v0, v1, v2, v3);
                const uint4 heads = (uint4)(${", ".join(f"head_at(base + at + {e} * inner)" for e in range(4))});
                const uint4 bits = as_uint4(codes_of(v, divisor, least, heads, mixed, levels) + WHOLE_MAGIC) & 0xffu;
                tile[33 * lane + word] = bits.x | bits.y << 8 | bits.z << 16 | bits.w << 24;
            }
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    const uint l = begin + 4 * lane;
    if (l >= length) return;
    for (uint column = deep; column < 32; column += ${DEEP}) {
        const ulong target = q0 + column;
        if (target < columns) {
            const uint word = tile[33 * column + lane];
            __global char *place = codes + target * length + l;
% if ALIGNED:
            *(__global uint *)place = word;
% else:
            for (uint i = 0; i < 4 && l + i < length; i++) place[i] = (char)(word >> 8 * i);
% endif
        }
    }
}
% elif NAME == "absmax_columns":
// Item (outer * strips + strip, split): the strip's maxima stay with the item while rows of the chunk pass by.
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void absmax_columns(${ARGUMENTS}, const ulong inner, const ulong columns, const uint length, const uint chunk, const uint strips) {
    const size_t outer = get_global_id(0) / strips;
    const ulong c0 = (get_global_id(0) - outer * strips) * 1024;
    const uint count = (uint)min(inner - c0, (ulong)1024);
    const uint begin = get_global_id(1) * chunk;
    const uint end = min(begin + chunk, length);
    uint8 most[128];
    const uint vectors = (count + 7) / 8;
    for (uint i = 0; i < vectors; i++) most[i] = (uint8)(0);
    for (uint l = begin; l < end; l++) {
        const __global ${stored(X)} *source = x + x0 + (outer * length + l) * inner + c0;
        for (uint i = 0; i < count / 8; i++) most[i] = max(most[i], magnitudes(load_${X}(source + 8 * i)${FACTOR}));
        if (count % 8) {
            const uint i = count / 8;
            most[i] = max(most[i], magnitudes(load_left_${X}(source + 8 * i, count % 8, 0.0f)${FACTOR}));
        }
    }
    __global uint *target = parts + get_global_id(1) * columns + outer * inner + c0;
    for (uint i = 0; i < count / 8; i++) vstore8(most[i], i, target);
    for (uint i = count / 8 * 8; i < count; i++) target[i] = ((const uint *)most)[i];
}
% elif NAME == "scaled_transposed":
// Swaps, between two words, of the blocks that `mask` names in the first after a shift: a round of a transposition.
inline void exchange(ulong *a, ulong *b, const uint shift, const ulong mask) {
    const ulong t = (*a >> shift ^ *b) & mask;
    *b ^= t;
    *a ^= t << shift;
}

// Item (strip of columns, block of the length): a tile of codes lies with the item, eight a word, and leaves along the columns.
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void scaled_transposed(${ARGUMENTS}, const ulong inner, const ulong columns, const uint length, const uint chunk${CHANCE}) {
    ulong tile[${TILE_ROWS * TILE_COLUMNS // 8}];
    const ulong c0 = get_global_id(0) * ${TILE_COLUMNS};
    const uint count = (uint)min(inner - c0, (ulong)${TILE_COLUMNS});
    const uint begin = get_global_id(1) * ${TILE_ROWS};
    const uint rows = min(length - begin, ${TILE_ROWS}u);
    const uint mixed = seed ^ seed >> 16;
    for (uint r = 0; r < rows; r++) {
        const uint l = begin + r;
        const ulong at = l * inner + c0;
        for (uint j = 0; j < count; j += 8) {
            const vec own_scale = load_left_float32(scale + c0 + j, count - j, 1.0f);
            const vec v = load_left_${X}(x + x0 + at + j, count - j, 0.0f)${FACTOR};
            const vec code = codes_of(v, divisors_of(own_scale), leasts_of(own_scale), heads_at(base + at + j), mixed, levels);
            tile[${TILE_COLUMNS // 8} * r + j / 8] = as_ulong(convert_char8(as_int8(code + WHOLE_MAGIC)));
        }
    }
    for (uint c = 0; c < count; c += 8) {
        __global char *target = codes + (c0 + c) * length + begin;
        for (uint r = 0; r < rows; r += 8) {
            // Rows beyond the block's end repeat its last one.
% for i in range(8):
            ulong word${i} = tile[${TILE_COLUMNS // 8} * min(r + ${i}, rows - 1) + c / 8];
% endfor
% for shift, mask in ((32, "0x00000000ffffffffUL"), (16, "0x0000ffff0000ffffUL"), (8, "0x00ff00ff00ff00ffUL")):
% for i in range(8):
% if not i & shift // 8:
            exchange(&word${i}, &word${i + shift // 8}, ${shift}, ${mask});
% endif
% endfor
% endfor
            if (count - c >= 8 && rows - r >= 8) {
% for i in range(8):
                vstore8(as_char8(word${i}), 0, target + ${i} * (ulong)length + r);
% endfor
            } else {
                const ulong words[8] = {${", ".join(f"word{i}" for i in range(8))}};
                for (uint i = 0; i < min(count - c, 8u); i++) {
                    for (uint k = 0; k < min(rows - r, 8u); k++) target[i * (ulong)length + r + k] = (char)(words[i] >> 8 * k);
                }
            }
        }
    }
}
% else:
// Item: `chunk` of the outer * length stretches of `inner` elements.
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void ${COLUMNS_KERNEL}(${ARGUMENTS}, const ulong inner, const ulong columns, const uint length, const uint chunk${CHANCE}) {
    const size_t first = get_global_id(0) * (size_t)chunk;
    const size_t last = min(first + chunk, columns / inner * length);
    ${"const uint mixed = seed ^ seed >> 16;" if NAME == "scaled_columns" else ""}
    for (size_t stretch = first; stretch < last; stretch++) {
        const size_t outer = stretch / length;
        const uint l = stretch - outer * length;
        const __global float *scales = scale + outer * inner;
        for (ulong c = 0; c < inner; c += 8) {
            const uint left = (uint)min(inner - c, (ulong)8);
            const ulong at = stretch * inner + c;
            const vec own_scale = load_left_float32(scales + c, left, 1.0f);
% if NAME == "scaled_columns":
            const vec v = load_left_${X}(x + x0 + at, left, 0.0f)${FACTOR};
            put_codes(codes, at, left, codes_of(v, divisors_of(own_scale), leasts_of(own_scale), heads_at(base + at), mixed, levels));
% else:
            store_left_${X}(y + at, left, take_codes(codes, at, left) * own_scale);
% endif
        }
    }
}
% endif
