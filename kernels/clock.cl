// The decimation clock of a layer, kept on the device so that a step waits for nothing.
//
// clock   long [4]: period, since, fire, flips_before         totals   long [3]: counters moved, ternary weights changed, rows skipped
//
// One work-item each. Launched by memtrain_cl/ops/clock.py before and after a layer's update; the update, and the product of its gradient,
// do nothing while fire is 0.

// A step begins.
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void advance_clock(__global long *clock, const __global long *totals) {
    const long since = clock[1] + 1;
    const long fire = since >= clock[0];
    clock[1] = fire ? 0 : since;
    clock[2] = fire;
    if (fire) clock[3] = totals[1];
}

// A step ends: the share of the layer's weights that its update changed decides after how many steps the next one comes.
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void observe_clock(__global long *clock, const __global long *totals, const long weights) {
    const long flips = totals[1] - clock[3];
    // One doubling for each of the rates 1e-3, 1e-4 and 1e-5 that it does not exceed.
    const int calm = (flips * 1000 <= weights) + (flips * 10000 <= weights) + (flips * 100000 <= weights);
    if (clock[2]) clock[0] = 1 << calm;
}
