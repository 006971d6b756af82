// How exact sums that tensor cores left in registers go to the result (_int8_mma.cl, _int8_wgmma.cl).
<%doc>After the last products: what each column's sums are multiplied by comes to local memory, as `factors`.</%doc>
<%def name="begin_results()">
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    barrier(CLK_LOCAL_MEM_FENCE);
    __local float *factors = (__local float *)tiles;
    for (uint i = item; i < ${LENGTH["b"]}; i += ${ITEMS}) factors[i] = scales == 2 && n0 + i < N ? col[n0 + i] : 1.0f;
    barrier(CLK_LOCAL_MEM_FENCE);
</%def>
<%doc>Two neighbouring sums of row m to their place, from column n0 + at on. `own`: the row's factor.</%doc>
<%def name="put_pair(at, x, y)">
            {
                const uint n = n0 + ${at};
                int2 sums = (int2)(${x}, ${y});
                if (scales) sums = as_int2(convert_float2(sums) * (own * *(__local float2 *)(factors + ${at})));
                if (n + 1 < N) {
                    if (pairs) *(__global int2 *)(target + n) = sums;
                    else vstore2(sums, 0, target + n);
                } else if (n < N) {
                    target[n] = sums.x;
                }
            }
</%def>
