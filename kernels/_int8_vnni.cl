// multiply_tile of _int8_cpu.cl by x86's dot products of four bytes without and with a sign (AVX-512 VNNI). As inline assembly, for
// compilers' own built-ins of cl_khr_integer_dot_product are calls a lane on CPUs. The constraint "X", of floating type, is the one that
// OpenCL compilers without x86's own take, and gives a vector register of the first sixteen. memtrain_cl/inline_vnni.py finds out whether
// a device's compiler does, before any other use.
<%
TURNS = 4
SUMS = [f"sum{i}_{v}" for i in range(TILE_M) for v in range(VECTORS)]
%>
inline void multiply_tile(__local int *sums, const __local uint *tile, const int *surplus, const __local uint *panel, const uint cells) {
    ${V} ${", ".join(SUMS)}, b0, b1, a0;
    const __local uint *panel_at = panel;
    const __local uint *tile_at = tile;
    ulong turns = cells / ${TURNS};
    __asm__ __volatile__(
% for name in SUMS:
        "vpxord %[${name}], %[${name}], %[${name}]\n"
% endfor
        "1:\n"
% for turn in range(TURNS):
        "vmovdqu64 ${128 * turn}(%[panel]), %[b0]\n"
        "vmovdqu64 ${128 * turn + 64}(%[panel]), %[b1]\n"
% for i in range(TILE_M):
        "vpbroadcastd ${4 * DEPTH * i + 4 * turn}(%[tile]), %[a0]\n"
        "vpdpbusd %[a0], %[b0], %[sum${i}_0]\n"
        "vpdpbusd %[a0], %[b1], %[sum${i}_1]\n"
% endfor
% endfor
        "add $${128 * TURNS}, %[panel]\n"
        "add $${4 * TURNS}, %[tile]\n"
        "dec %[turns]\n"
        "jnz 1b\n"
        : ${", ".join(f'[{name}] "=&X"({name})' for name in [*SUMS, "b0", "b1", "a0"])},
          [panel] "+r"(panel_at), [tile] "+r"(tile_at), [turns] "+r"(turns)
        :
        : "memory", "cc");
% for i in range(TILE_M):
    *(__local ${I} *)(sums + PANEL * ${i}) = as_${I}(sum${i}_0) - surplus[${i}];
    *(__local ${I} *)(sums + PANEL * ${i} + ${WIDTH}) = as_${I}(sum${i}_1) - surplus[${i}];
% endfor
}
