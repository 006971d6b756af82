// Negative log-likelihood of int64 targets, over x [images, classes, space] and target [images, space].
//
//   per target   loss = -weight[t] * x[image, t, place]; 0 where t = ignore
//   mean         sum(loss) / total        sum        sum(loss)        total = sum(weight[t]), both without the ignored
//   backward     grad_x = -weight[t] * grad_y (/ total for the mean) at t, 0 elsewhere
//
// A target that is neither `ignore` nor a class reads nothing, counts nothing and reports a fault. Launched by
// memtrain_cl/launchers/loss.py. Constants: GPU or not, GROUP (work-items that add together), X (elements of x), W (elements
// of weight, "" for weights of 1).
#include "_types.cl"
#include "_faults.cl"

// (loss, weight) of target i.
inline float2 loss_of(const __global ${stored(X)} *x, const __global ${stored(W or X)} *weight,
                      const __global long *target, const ulong i, const uint classes, const ulong space,
                      const long ignore, volatile __global long *faults) {
    const long t = target[i];
    if (t == ignore) return (float2)(0.0f);
    if (t < 0 || t >= classes) {
        report(faults, ${FAULT_INDEX}, t, classes);
        return (float2)(0.0f);
    }
    const ulong image = i / space;
    const float v = ${load(X, "x", "(image * classes + t) * space + (i - image * space)")};
    const float w = ${load(W, "weight", "t") if W else "1.0f"};
    return (float2)(-w * v, w);
}

__kernel void nll_each(const __global ${stored(X)} *x, const ulong x0, const __global long *target, const ulong target0,
                       const __global ${stored(W or X)} *weight, const ulong weight0, __global ${stored(X)} *loss,
                       const ulong loss0, const uint classes, const ulong space, const long ignore,
                       volatile __global long *faults) {
    const ulong i = get_global_id(0);
    const float2 own = loss_of(x + x0, weight + weight0, target + target0, i, classes, space, ignore, faults);
    ${store(X, "loss", "loss0 + i", "own.x")};
}

<%def name="add_together(scratch)">
% if GPU:
    __local float2 ${scratch}[${GROUP}];
    const uint item = get_local_id(0);
    ${scratch}[item] = sum;
    for (uint half_ = ${GROUP // 2}; half_ > 0; half_ /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (item < half_) ${scratch}[item] += ${scratch}[item + half_];
    }
    const bool last = item == 0;
    if (last) sum = ${scratch}[0];
% else:
    const bool last = true;
% endif
</%def>
// A work-group adds every ..th target: parts float2 [groups].
__kernel __attribute__((reqd_work_group_size(${GROUP}, 1, 1)))
void nll_parts(const __global ${stored(X)} *x, const ulong x0, const __global long *target, const ulong target0,
               const __global ${stored(W or X)} *weight, const ulong weight0, __global float2 *parts,
               const uint classes, const ulong space, const ulong count, const long ignore,
               volatile __global long *faults) {
    float2 sum = (float2)(0.0f);
    for (ulong i = get_global_id(0); i < count; i += get_global_size(0)) {
        sum += loss_of(x + x0, weight + weight0, target + target0, i, classes, space, ignore, faults);
    }
    ${add_together("scratch")}
    if (last) parts[get_group_id(0)] = sum;
}

// One work-group adds the parts.
__kernel __attribute__((reqd_work_group_size(${GROUP}, 1, 1)))
void nll_total(const __global float2 *parts, __global ${stored(X)} *loss, const ulong loss0,
               __global ${stored(X)} *total, const ulong total0, const uint count, const uint mean) {
    float2 sum = (float2)(0.0f);
    for (uint i = get_local_id(0); i < count; i += ${GROUP}) sum += parts[i];
    ${add_together("scratch")}
    if (last) {
        const float result = mean ? sum.x / sum.y : sum.x;
        ${store(X, "loss", "loss0", "result")};
        ${store(X, "total", "total0", "sum.y")};
    }
}

// A work-item a target, over a result of zeros.
__kernel void nll_backward(const __global ${stored(X)} *grad_y, const ulong grad_y0, const ulong grad_step,
                           const __global long *target, const ulong target0, const __global ${stored(W or X)} *weight,
                           const ulong weight0, const __global ${stored(X)} *total, const ulong total0,
                           __global ${stored(X)} *grad_x, const ulong grad_x0, const uint classes, const ulong space,
                           const long ignore, const uint mean) {
    const ulong i = get_global_id(0);
    const long t = target[target0 + i];
    if (t == ignore || t < 0 || t >= classes) return;
    float g = -${load(X, "grad_y", "grad_y0 + i * grad_step")};
% if W:
    g *= ${load(W, "weight", "weight0 + t")};
% endif
    if (mean) g /= ${load(X, "total", "total0")};
    const ulong image = i / space;
    ${store(X, "grad_x", "grad_x0 + (image * classes + t) * space + (i - image * space)", "g")};
}
