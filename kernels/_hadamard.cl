<%doc>
Blocks of ROT consecutive numbers times the regular Hadamard matrix, in the order that memtrain_cl/reference/hadamard.py states. Expects GPU, ROT
(1, 4, 16, 64 or 256; 1 changes nothing), ITEMS (GPU: work-items of a group, a multiple of 16; of 32 where PTX is 1), PTX, _rows.cl.

GPU: a work-item holds a run, 16 consecutive numbers in registers; 16 items in a row, from a multiple of 16 on, hold 256.
    rotate_runs(own, exchanged, lid)    every item calls it; `exchanged` is HADAMARD_LOCAL floats of local memory, on 16 bytes
    whole_rotation                      the same without the numbers' way back to their items: item i then holds i, i + 16, i + 32 ... of the 256
    rotate_spread                       the same of other places: item i holds, before and after, the four from 4i on, then from 4i + 64, 4i + 128
                                        and 4i + 192 on, so that items side by side have what lies side by side; SPREAD floats of local memory
CPU:
    rotate_block(block, count)          `block`: 256 numbers in local memory, of which the first `count` are rotated, up to a multiple of 16
</%doc>
<% ROOT = {1: 1, 4: 2, 16: 4, 64: 8, 256: 16}[ROT] %>
% if GPU:
#define HADAMARD_LOCAL ${21 * ITEMS}
// Sixteens of 272: a block's quarters begin four banks apart, and blocks sixteen.
#define SPREAD ${17 * ITEMS}

// Between items of the same sixteen. PTX: they are of one warp.
% if PTX:
#define BARRIER_OF_16 asm volatile("bar.warp.sync 0xffffffff;" ::: "memory")
% else:
#define BARRIER_OF_16 barrier(CLK_LOCAL_MEM_FENCE)
% endif

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
// Between runs and numbers sixteen apart, whose owners write where they have read, so that a barrier stands only before what others have written is
// read. A run is twenty from the next, a block sixteen banks from the next.
inline void runs_to_columns(float *own, __local float *block, uint i) {
% for q in range(4):
    vstore4(vload4(${q}, own), ${q}, block + 20 * i);
% endfor
    BARRIER_OF_16;
% for k in range(16):
    own[${k}] = block[${20 * k} + i];
% endfor
}

inline void columns_to_runs(float *own, __local float *block, uint i) {
% for k in range(16):
    block[${20 * k} + i] = own[${k}];
% endfor
    BARRIER_OF_16;
% for q in range(4):
    vstore4(vload4(${q}, block + 20 * i), ${q}, own);
% endfor
}
% endif

<%def name="last_turns()">
% if ROT > 64:
    rotate_far(own);
% endif
% if ROT > 1:
    #pragma unroll
    for (uint k = 0; k < 16; k++) own[k] *= ${1 / ROOT}f;
% endif
</%def>
<%def name="rotation_to_columns()">
% if ROT > 1:
    rotate_near(own);
% endif
% if ROT > 4:
    rotate_far(own);
% endif
% if ROT > 16:
    const uint i = lid & 15;
    __local float *block = exchanged + (lid - i) * 21;
    runs_to_columns(own, block, i);
    rotate_near(own);
% endif
${last_turns()}
</%def>
inline void whole_rotation(float *own, __local float *exchanged, uint lid) {
    ${rotation_to_columns()}
% if ROT > 16:
    // Runs are written next, by others.
    BARRIER_OF_16;
% endif
}

inline void rotate_runs(float *own, __local float *exchanged, uint lid) {
    ${rotation_to_columns()}
% if ROT > 16:
    columns_to_runs(own, block, i);
% endif
}

// Of a number's place in its block, an item holds the first and last digit to base four, in between, while those are rotated, the others. It
// writes where it has read, so that a barrier stands only before what others have written is read.
inline void rotate_spread(float *own, __local float *exchanged, uint lid) {
% if ROT > 1:
    rotate_near(own);
% endif
% if ROT > 4:
    const uint i = lid & 15;
    __local float *block = exchanged + (lid - i) * 17;
    __local float4 *outer = (__local float4 *)block + i;
    __local float *inner = block + (i & 3) + 68 * (i >> 2);
% for m in range(4):
    outer[${17 * m}] = vload4(${m}, own);
% endfor
    BARRIER_OF_16;
% for k in range(16):
    own[${k}] = inner[${4 * k}];
% endfor
    rotate_near(own);
% if ROT > 16:
    rotate_far(own);
% endif
% for k in range(16):
    inner[${4 * k}] = own[${k}];
% endfor
    BARRIER_OF_16;
% for m in range(4):
    vstore4(outer[${17 * m}], ${m}, own);
% endfor
% endif
${last_turns()}
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
