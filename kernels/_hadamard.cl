<%doc>
Blocks of ROT consecutive numbers times the regular Hadamard matrix, in the order that memtrain_cl/reference/hadamard.py states. Expects GPU, ROT
(1, 4, 16, 64 or 256; 1 changes nothing), ITEMS (GPU: work-items of a group, a multiple of 16), _rows.cl.

GPU: a work-item holds a run, 16 consecutive numbers in registers; 16 items in a row, from a multiple of 16 on, hold 256.
    rotate_runs(own, exchanged, lid)    every item calls it; `exchanged` is HADAMARD_LOCAL floats of local memory
    whole_rotation                      the same without the numbers' way back to their items: item i then holds i, i + 16, i + 32 ... of the 256
CPU:
    rotate_block(block, count)          `block`: 256 numbers in local memory, of which the first `count` are rotated, up to a multiple of 16
</%doc>
<% ROOT = {1: 1, 4: 2, 16: 4, 64: 8, 256: 16}[ROT] %>
% if GPU:
#define HADAMARD_LOCAL ${17 * ITEMS}

inline void rotate_four(float *x, uint apart) {
    const float a = x[0], b = x[apart], c = x[2 * apart], d = x[3 * apart];
    x[0] = ((a + b) + c) - d;
    x[apart] = ((a + b) - c) + d;
    x[2 * apart] = ((a - b) + c) + d;
    x[3 * apart] = ((b - a) + c) + d;
}

inline void rotate_near(float *own) {
% for i in range(4):
    rotate_four(own + ${4 * i}, 1);
% endfor
}

inline void rotate_far(float *own) {
% for i in range(4):
    rotate_four(own + ${i}, 4);
% endfor
}

% if ROT > 16:
// Seventeen apart, so that neither way meets in a bank of memory. Two barriers: numbers are read before the second.
inline void exchange(float *own, __local float *block, uint from, uint from_apart, uint to, uint to_apart) {
% for k in range(16):
    block[from + ${k} * from_apart] = own[${k}];
% endfor
    barrier(CLK_LOCAL_MEM_FENCE);
% for k in range(16):
    own[${k}] = block[to + ${k} * to_apart];
% endfor
    barrier(CLK_LOCAL_MEM_FENCE);
}
% endif

inline void whole_rotation(float *own, __local float *exchanged, uint lid) {
% if ROT > 1:
    rotate_near(own);
% endif
% if ROT > 4:
    rotate_far(own);
% endif
% if ROT > 16:
    const uint i = lid & 15;
    exchange(own, exchanged + (lid - i) * 17, 17 * i, 1, i, 17);
    rotate_near(own);
% endif
% if ROT > 64:
    rotate_far(own);
% endif
% if ROT > 1:
    #pragma unroll
    for (uint k = 0; k < 16; k++) own[k] *= ${1 / ROOT}f;
% endif
}

inline void rotate_runs(float *own, __local float *exchanged, uint lid) {
    whole_rotation(own, exchanged, lid);
% if ROT > 16:
    const uint i = lid & 15;
    exchange(own, exchanged + (lid - i) * 17, i, 17, 17 * i, 1);
% endif
}
% else:
% if ROT > 1:
// Of each four neighbours. A sum with a number whose sign is turned is the difference, to the bit.
inline float8 rotate_near(float8 v) {
    const uint8 second = (uint8)(0, 0, 0x80000000u, 0x80000000u, 0, 0, 0x80000000u, 0x80000000u);
    const uint8 third = (uint8)(0, 0x80000000u, 0, 0, 0, 0x80000000u, 0, 0);
    const uint8 fourth = (uint8)(0x80000000u, 0, 0, 0, 0x80000000u, 0, 0, 0);
    const float8 sum = v.s00014445 + as_float8(as_uint8(v.s11105554) ^ second);
    return (sum + as_float8(as_uint8(v.s22226666) ^ third)) + as_float8(as_uint8(v.s33337777) ^ fourth);
}
% endif
% if ROT > 4:
// Of each four of sixteen numbers that lie four apart.
inline void rotate_far(float8 *low, float8 *high) {
    const uint8 third = (uint8)(0, 0, 0, 0, 0x80000000u, 0x80000000u, 0x80000000u, 0x80000000u);
    const uint8 fourth = (uint8)(0x80000000u, 0x80000000u, 0x80000000u, 0x80000000u, 0, 0, 0, 0);
    const float8 swapped = (*low).s45670123;
    const float8 c = (*high).s01230123, d = (*high).s45674567;
    const float8 sum = *low + swapped, difference = *low - swapped;
    *low = (sum + as_float8(as_uint8(c) ^ third)) + as_float8(as_uint8(d) ^ fourth);
    *high = (difference + c) + d;
}
% endif

% if ROT > 16:
inline void rotate_four(__local float *x, uint apart, float factor) {
    const float8 a = vload8(0, x), b = vload8(0, x + apart), c = vload8(0, x + 2 * apart), d = vload8(0, x + 3 * apart);
    vstore8((((a + b) + c) - d) * factor, 0, x);
    vstore8((((a + b) - c) + d) * factor, 0, x + apart);
    vstore8((((a - b) + c) + d) * factor, 0, x + 2 * apart);
    vstore8((((b - a) + c) + d) * factor, 0, x + 3 * apart);
}
% endif

inline void rotate_block(__local float *block, uint count) {
% if ROT > 1:
    for (uint j = 0; j < count; j += 16) {
        float8 low = rotate_near(vload8(0, block + j)), high = rotate_near(vload8(0, block + j + 8));
% if ROT > 4:
        rotate_far(&low, &high);
% endif
        vstore8(low${f" * {1 / ROOT}f" if ROT <= 16 else ""}, 0, block + j);
        vstore8(high${f" * {1 / ROOT}f" if ROT <= 16 else ""}, 0, block + j + 8);
    }
% endif
% if ROT > 16:
    for (uint j = 0; j < count; j += 64) {
        rotate_four(block + j, 16, ${1 / ROOT if ROT == 64 else 1.0}f);
        rotate_four(block + j + 8, 16, ${1 / ROOT if ROT == 64 else 1.0}f);
    }
% endif
% if ROT > 64:
    for (uint j = 0; j < 64; j += 8) rotate_four(block + j, 64, ${1 / ROOT}f);
% endif
}
% endif
