// Kernels of kernels/stochastic.cl over rows whose elements lie `inner` > 1 apart. A column q, of outer * inner, is such a row; neighbours
// lie side by side. GPU: groups of 32 by DEEP work-items, each over STEP columns (four where ALIGNED) and every `chunk`-th of the length, so that
// groups at work at a time read what lies together. CPU: stretches of the memory's own rows in vectors of eight.
<%
COLUMNS_KERNEL = NAME
STEP = 4 if GPU and ALIGNED else 1
CODE = {"int8": "char", "int16": "short", "int4": "uchar"}[CODES]
# GPUs find the scales on the way.
GIVEN = f"const __global uint *parts, const uint splits, {SCALES}" if GPU else f"const {SCALES}"
ARGUMENTS = {
    "absmax_columns": f"{SOURCE}, {FACTORS}__global uint *parts",
    "scaled_columns": f"{SOURCE}, {FACTORS}{GIVEN}, __global {CODE} *codes",
    "scaled_transposed": f"{SOURCE}, {FACTORS}{GIVEN}, __global {CODE} *codes",
    "dequantize_columns": f"const __global {CODE} *codes, const {SCALES}, __global {stored(X)} *y",
}[NAME]
CHANCE = ", const float levels, const uint seed, const ulong base" if NAME.startswith("scaled") else ""
FACTOR = " * multiplier[l]" if MULTIPLIED else ""
TILE_ROWS, TILE_COLUMNS = (256, 32) if GPU else (64, 128)
%>
% if GPU and NAME.startswith("scaled"):
// Of `width` columns from `from` on, from their largest bits in `splits` parts: `scales`, and scale[q] from one group of those that need it.
<%def name="column_scales(width, start, item, writes)">
    __local uint found[${32 * DEEP}];
    __local float scales[${width}] __attribute__((aligned(16)));
<% ACROSS = min(width, 32 * DEEP) %>
% for part in range(width // ACROSS):
    {
        const uint column = (${item}) % ${ACROSS};
        const ulong place = ${start} + ${part * ACROSS} + column;
        uint most = 0;
        if (place < columns) {
            #pragma unroll 4
            for (uint i = (${item}) / ${ACROSS}; i < splits; i += ${32 * DEEP // ACROSS}) most = max(most, parts[i * columns + place]);
        }
        found[${item}] = most;
        barrier(CLK_LOCAL_MEM_FENCE);
        if ((${item}) < ${ACROSS}) {
            for (uint i = 1; i < ${32 * DEEP // ACROSS}; i++) most = max(most, found[${ACROSS} * i + column]);
            scales[${part * ACROSS} + column] = scale_of(most, levels);
            if (${writes} && place < columns) scale[place] = scales[${part * ACROSS} + column];
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
% endfor
</%def>
% endif
% if GPU and NAME != "scaled_transposed":
__kernel __attribute__((reqd_work_group_size(32, ${DEEP}, 1)))
void ${COLUMNS_KERNEL}(${ARGUMENTS}, const ulong inner, const ulong columns, const uint length, const uint chunk${CHANCE}) {
    const uint lane = get_local_id(0);
    const uint deep = get_local_id(1);
    const ulong q = ${STEP} * (ulong)get_global_id(0);
    const uint begin = get_group_id(1) * ${DEEP} + deep;
    const uint within = q < columns;
    const ulong outer = columns == inner || !within ? 0 : q / inner;
    const ulong first = outer * length * inner + (q - outer * inner);
% if NAME == "absmax_columns":
    uint4 most = (uint4)(0);
    if (within) {
        const __global ${stored(X)} *source = x + x0 + first;
        #pragma unroll 8
        for (uint l = begin; l < length; l += chunk) {
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
% if NAME == "scaled_columns":
    ${column_scales(32 * STEP, f"{32 * STEP} * (ulong)get_group_id(0)", "32 * deep + lane", "get_group_id(1) == 0")}
    if (!within) return;
    const float4 own_scale = ${"vload4(lane, scales)" if STEP == 4 else "(float4)(scales[lane])"};
% if FIXED:
    const quantum by[4] = {${", ".join(f"quantum_of(own_scale.{e})" for e in "xyzw")}};
    const uint finite = low_bytes(${", ".join(f"by[{e}].finite" for e in range(4))});
    const float bound = levels * 0x1p24f;
    const salts around = near(base);
% else:
    const float4 divisor = (float4)(${", ".join(f"divisor_of(own_scale.{e})" for e in "xyzw")});
    const uint4 least = (uint4)(${", ".join(f"least_of(own_scale.{e})" for e in "xyzw")});
% endif
    const uint mixed = seed ^ seed >> 16;
% else:
    if (!within) return;
    const float4 own_scale = ${"vload4(0, scale + q)" if STEP == 4 else "(float4)(scale[q])"};
% endif
    #pragma unroll 4
    for (uint l = begin; l < length; l += chunk) {
        const ulong at = first + l * inner;
% if NAME == "scaled_columns":
        const float4 v = ${f"load_{X}(x + x0 + at)" if STEP == 4 else f"(float4)({load(X, 'x', 'x0 + at')})"}${FACTOR};
% if FIXED:
        const uint4 heads = heads_near(${"near(base + at)" if FAR else "around"}, (uint)(base + at));
        const uint packed = packed_codes(${", ".join(f"fixed_code(v.{e}, by[{i}], heads.{e}, mixed, bound)" for i, e in enumerate("xyzw"))});
        put_packed(codes, at, ${STEP}, stored_codes(packed, finite));
% else:
        put_codes(codes, at, ${STEP}, codes_of(v, divisor, least, heads_at(base + at), mixed, levels));
% endif
% else:
        store_left_${X}(y + at, ${STEP}, take_codes(codes, at, ${STEP}) * own_scale);
% endif
    }
% endif
}
% elif GPU:
// A group takes ${TILE_COLUMNS} columns and ${TILE_ROWS} of the length at a time, `chunk` in all, an item four by four of them: its codes of a
// column are a word of a tile in local memory, which leaves along the columns. Last rows come first: the columns' maxima were found the other way
// round, and what a cache of the device kept of that are the last ones. WORDS: the length is whole numbers of as many words.
__kernel __attribute__((reqd_work_group_size(32, ${DEEP}, 1)))
void scaled_transposed(${ARGUMENTS}, const ulong inner, const ulong columns, const uint length, const uint chunk${CHANCE}) {
<%
# Neighbours in a column lie one bank apart, those of the next four columns four: neither writing nor reading meets.
PITCH = TILE_ROWS // 4 + 1
UNIT = 4 if WORDS == 4 else 1
%>
    __local uint tile[${TILE_COLUMNS * PITCH}];
    const uint item = 32 * get_local_id(1) + get_local_id(0);
    // Groups lie along one dimension, the only one of which GPUs take any number, though fewer than 2^32.
    const uint strips = (uint)((inner + ${TILE_COLUMNS - 1}) / ${TILE_COLUMNS});
    const uint block = (uint)get_group_id(0) / strips;
    const ulong q0 = ((uint)get_group_id(0) - block * strips) * (ulong)${TILE_COLUMNS};
    const uint first = ((length - 1) / chunk - block) * chunk;
    const uint last = min(length - first, chunk) + first;
    ${column_scales(TILE_COLUMNS, "q0", "item", "block == 0")}
    const uint c = 4 * (item % 8);
    const ulong q = q0 + c;
    const uint left = q < columns ? (uint)min(columns - q, (ulong)4) : 0;
% for e in range(4):
    const quantum by${e} = quantum_of(scales[c + ${e}]);
% endfor
    const salts around = near(base);
    const float bound = levels * 0x1p24f;
    const uint mixed = seed ^ seed >> 16;
    for (uint begin = first; begin < last; begin += ${TILE_ROWS}) {
        const uint height = min(last - begin, ${TILE_ROWS}u);
        for (uint word = item / 8; left && 4 * word < height; word += ${4 * DEEP}) {
            const uint l = begin + 4 * word;
            const ulong at = l * inner + q;
% for i in range(4):
<%
BEYOND = f"4 * word + {i} >= height ? (float4)(0.0f) : " if i else ""
OWN_FACTOR = f" * multiplier[min(l + {i}, length - 1)]" if MULTIPLIED else ""
%>
            const float4 v${i} = ${BEYOND}load_left_${X}(x + x0 + at + ${i} * inner, left, 0.0f)${OWN_FACTOR};
% endfor
% for i in range(4):
            const uint4 heads${i} = heads_near(${f"near(base + at + {i} * inner)" if FAR else "around"}, (uint)(base + at + ${i} * inner));
% endfor
% for e, lane in enumerate("xyzw"):
            tile[${PITCH} * (c + ${e}) + word] =
                packed_codes(${", ".join(f"fixed_code(v{i}.{lane}, by{e}, heads{i}.{lane}, mixed, bound)" for i in range(4))});
% endfor
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        // Eight items in a row write along a column, the next eight along the next one.
        for (uint column = item / 8; column < ${TILE_COLUMNS}; column += ${4 * DEEP}) {
            if (q0 + column >= columns) break;
            __global char *target = codes + (q0 + column) * length + begin;
            const uint finite = quantum_of(scales[column]).finite;
            for (uint word = ${UNIT} * (item % 8); 4 * word < height; word += ${8 * UNIT}) {
                const __local uint *made = tile + ${PITCH} * column + word;
% if WORDS == 4:
                *(__global uint4 *)(target + 4 * word) = (uint4)(made[0], made[1], made[2], made[3]) & finite;
% elif WORDS:
                *(__global uint *)(target + 4 * word) = *made & finite;
% else:
                for (uint i = 0; i < min(height - 4 * word, 4u); i++) target[4 * word + i] = (char)((*made & finite) >> 8 * i);
% endif
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
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
