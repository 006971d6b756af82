<%doc>
lanes_max(value, own, lane): the largest value of the LANES work-items that share a row, in all of them. Expects LANES, and MOST, the type
of a value: uint, or uint2 for two at once. `own` is LANES + MOST_STAGE of them in local memory. Every work-item of the group calls it.
</%doc>
<%
# About the square root of the lanes: both stages then take equally long.
MOST_STAGE = 1 << LANES.bit_length() // 2
%>
// Two barriers: the values are read before the second, the partial results before the first of the next call.
inline ${MOST} lanes_max(${MOST} value, __local ${MOST} *own, uint lane) {
    own[lane] = value;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lane < ${MOST_STAGE}) {
        ${MOST} most = own[lane];
        #pragma unroll
        for (uint i = 1; i < ${LANES // MOST_STAGE}; i++) most = max(most, own[lane + ${MOST_STAGE} * i]);
        own[${LANES} + lane] = most;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    ${MOST} most = own[${LANES}];
    #pragma unroll
    for (uint i = 1; i < ${MOST_STAGE}; i++) most = max(most, own[${LANES} + i]);
    return most;
}
