<%doc>
lanes_any(value, slot): whether the value holds in any of the LANES work-items of the group's slot, in all of them. LANES above 32 are the whole
group.

What _lanes_max.cl has, where PTX is 1: 32 work-items in a row exchange values without local memory. LANES below 32 divide it. Where a row is of
more, one barrier, and another one has to stand between two calls.
</%doc>
<%
MOST_STAGE = 0
WARPS = max(1, LANES // 32)
PARTS = ("",) if MOST == "uint" else (".x", ".y")
%>
inline ${MOST} lanes_max(${MOST} value, __local ${MOST} *own, uint lane) {
% for part in PARTS:
    {
        uint most = value${part}, other;
% if LANES >= 32:
        asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(other) : "r"(most));
        most = other;
% else:
% for apart in [1 << i for i in range(LANES.bit_length() - 1)]:
        asm volatile("shfl.sync.bfly.b32 %0, %1, ${apart}, 31, 0xffffffff;" : "=r"(other) : "r"(most));
        most = max(most, other);
% endfor
% endif
        value${part} = most;
    }
% endfor
% if WARPS > 1:
    if (lane % 32 == 0) own[lane / 32] = value;
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    value = own[0];
    #pragma unroll
    for (uint i = 1; i < ${WARPS}; i++) value = max(value, own[i]);
% endif
    return value;
}

inline bool lanes_any(bool value, uint slot) {
    uint any = value;
% if LANES > 32:
    asm volatile("{.reg .pred p, q; setp.ne.u32 q, %0, 0; bar.red.or.pred p, 0, q; selp.u32 %0, 1, 0, p;}" : "+r"(any) : : "memory");
% else:
    asm volatile("{.reg .pred q; setp.ne.u32 q, %0, 0; vote.sync.ballot.b32 %0, q, 0xffffffff;}" : "+r"(any));
% if LANES < 32:
    any = any >> slot % ${32 // LANES} * ${LANES} & ${(1 << LANES) - 1};
% endif
% endif
    return any != 0;
}
