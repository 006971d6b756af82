// Attention of one token over a cache of keys and values, and what fills the cache: rotary embedding of new rows.
//
//   rows float32 [T, 3, heads, HEAD]: query, key and value of each token.   keys, values float32 [heads, capacity, HEAD]
//   angles float32 [positions, HEAD/2, 2]: cosine and sine; a pair (i, i + HEAD/2) of a query or key at position p turns by
//   angle [p, i]
//
//   rotate_rows       turns queries in place and writes keys and values of positions start .. start + T
//   token_attention   the same for the one token at `position`, then out[h] = sum_p softmax_p(scale * q[h] . k[h, p]) v[h, p]
//                     over p <= position. scores [heads, capacity] is room for the probabilities.
//
// rotate_rows: a work-item takes `per` pairs. token_attention: a group of GROUP items takes a head (1 on CPUs). Scores: an
// item takes every GROUP-th position. Results: SLICES sets of COLUMNS items share the positions, an item has WIDE columns.
// Launched by memtrain_cl/launchers/token_attention.py. Constants: HEAD, GROUP, WIDE (a divisor of HEAD), COLUMNS.
<%
UNITS = HEAD // WIDE
SLICES = GROUP // COLUMNS
V = f"float{WIDE}"
%>
// Turns the pair i of a query or key.
inline void turn(const __global float *x, const __global float *angles, const uint i, float *first, float *second) {
    const float cosine = angles[2 * i];
    const float sine = angles[2 * i + 1];
    *first = x[i] * cosine - x[i + ${HEAD // 2}] * sine;
    *second = x[i + ${HEAD // 2}] * cosine + x[i] * sine;
}

// Key and value of a token to their place in the cache: pair i of them.
inline void place(const __global float *row, const __global float *angles, __global float *keys, __global float *values,
                  const uint heads, const uint i) {
    float first, second;
    turn(row + heads * ${HEAD}, angles, i, &first, &second);
    keys[i] = first;
    keys[i + ${HEAD // 2}] = second;
    values[i] = row[2 * heads * ${HEAD} + i];
    values[i + ${HEAD // 2}] = row[2 * heads * ${HEAD} + i + ${HEAD // 2}];
}

__kernel void rotate_rows(__global float *rows, const __global float *angles, __global float *keys, __global float *values,
                          const uint start, const uint heads, const uint capacity, const ulong pairs, const ulong per) {
    const ulong last = min(get_global_id(0) * per + per, pairs);
    for (ulong at = get_global_id(0) * per; at < last; at++) {
        const ulong line = at / ${HEAD // 2};
        const uint i = (uint)(at - line * ${HEAD // 2});
        const ulong token = line / heads;
        const uint head = (uint)(line - token * heads);
        __global float *row = rows + (token * 3 * heads + head) * ${HEAD};
        const __global float *turns = angles + (start + token) * ${HEAD};
        const size_t to = ((size_t)head * capacity + start + token) * ${HEAD};
        place(row, turns, keys + to, values + to, heads, i);
        float first, second;
        turn(row, turns, i, &first, &second);
        row[i] = first;
        row[i + ${HEAD // 2}] = second;
    }
}

<%
SUM = {2: "v.x + v.y", 4: "(v.x + v.y) + (v.z + v.w)", 8: "((v.s0 + v.s4) + (v.s2 + v.s6)) + ((v.s1 + v.s5) + (v.s3 + v.s7))"}[WIDE]
SPACE = "__local " if GROUP > 1 else ""
%>
<%def name="over_group(name, combine)">
% if GROUP > 1:
    shared[item] = ${name};
    for (uint half_of = ${GROUP // 2}; half_of > 0; half_of >>= 1) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (item < half_of) shared[item] = ${combine("shared[item]", "shared[item + half_of]")};
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    ${name} = shared[0];
    // Scores of others are read, and `shared` written, only after this.
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
% endif
</%def>
inline float sum_wide(const ${V} v) { return ${SUM}; }

__kernel __attribute__((reqd_work_group_size(${GROUP}, 1, 1)))
void token_attention(const __global float *rows, const __global float *angles, __global float *keys, __global float *values,
                     __global float *scores, __global float *out, const uint heads, const uint capacity, const float scale,
                     const uint position) {
    ${SPACE}${V} query[${UNITS}];
% if GROUP > 1:
    __local float shared[${GROUP}];
    __local ${V} parts[${GROUP}];
    const uint item = get_local_id(0);
% else:
    const uint item = 0;
% endif
    const uint head = get_group_id(0);
    keys += (size_t)head * capacity * ${HEAD};
    values += (size_t)head * capacity * ${HEAD};
    scores += (size_t)head * capacity;
    const __global float *row = rows + head * ${HEAD};
    const __global float *turns = angles + (size_t)position * ${HEAD};
    for (uint i = item; i < ${HEAD // 2}; i += ${GROUP}) {
        float first, second;
        turn(row, turns, i, &first, &second);
        ((${SPACE}float *)query)[i] = scale * first;
        ((${SPACE}float *)query)[i + ${HEAD // 2}] = scale * second;
        place(row, turns, keys + (size_t)position * ${HEAD}, values + (size_t)position * ${HEAD}, heads, i);
    }
% if GROUP > 1:
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
% endif
    float most = -INFINITY;
    for (uint p = item; p <= position; p += ${GROUP}) {
        const __global ${V} *key = (const __global ${V} *)(keys + (size_t)p * ${HEAD});
        ${V} sum = (${V})(0.0f);
        for (uint u = 0; u < ${UNITS}; u++) sum += query[u] * key[u];
        scores[p] = sum_wide(sum);
        most = max(most, scores[p]);
    }
    ${over_group("most", "max({}, {})".format)}
    float total = 0.0f;
    for (uint p = item; p <= position; p += ${GROUP}) {
        const float weight = exp(scores[p] - most);
        scores[p] = weight;
        total += weight;
    }
    ${over_group("total", "{} + {}".format)}
    const uint column = item % ${COLUMNS};
    const uint slice = item / ${COLUMNS};
    for (uint first = 0; first < ${UNITS}; first += ${COLUMNS}) {
        const uint u = first + column;
        ${V} sum = (${V})(0.0f);
        if (u < ${UNITS}) {
            for (uint p = slice; p <= position; p += ${SLICES}) {
                sum += scores[p] * ((const __global ${V} *)(values + (size_t)p * ${HEAD}))[u];
            }
        }
% if SLICES > 1:
        parts[item] = sum;
        barrier(CLK_LOCAL_MEM_FENCE);
        if (slice == 0) {
            for (uint other = 1; other < ${SLICES}; other++) sum += parts[other * ${COLUMNS} + column];
        }
        barrier(CLK_LOCAL_MEM_FENCE);
% endif
        if (slice == 0 && u < ${UNITS}) ((__global ${V} *)(out + head * ${HEAD}))[u] = sum / total;
    }
}
