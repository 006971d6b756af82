// The step of kernels/adam.cl on profiles of _profile.cl: a work-item of a GPU has one vector of its block.
<%def name="profile_updated(j)">
            ${weight_and_gradient(j, f"count - {j}")}
            vec m = profile_decode_${WIDTH}(convert_uchar${WIDTH}(take_codes(exp_avg, at + ${j}, count - ${j})), m_pair, -INFINITY, table_m);
            vec s = profile_decode_${WIDTH}(convert_uchar${WIDTH}(take_codes(exp_avg_sq, at + ${j}, count - ${j})), s_pair, s_least, table_s);
            adam_update(g, &p, &m, &s, rule);
</%def>
<%def name="put_profile(codes, moment, j)">
            put_whole(${moment}, at + ${j}, count - ${j}, convert_int${WIDTH}(${codes}));
</%def>
% if GPU:
    __local uint4 profiles[${SLOTS} * PROFILE_SCRATCH];
% if SKIP == "block":
    __local uint2 scratch[${SLOTS * (LANES + MOST_STAGE)}];
% endif
    ${blocks_begin()}
        ${flags_known()}
        const uint j = 4 * lane;
        const uint units = (count + 3) / 4;
        const float2 m_pair = count ? vload2(within, exp_avg_scale) : (float2)(0.0f);
        const float2 s_pair = count ? vload2(within, exp_avg_sq_scale) : (float2)(0.0f);
        const float s_least = profile_least(s_pair, 1);
        vec new_p = (vec)(0.0f), new_m = (vec)(0.0f), new_s = (vec)(0.0f);
        uint2 most = (uint2)(0);
        if (j < count) {
            ${profile_updated("j")}
            new_p = p;
            new_m = m;
            new_s = s;
            most.x = highest(magnitudes(g));
        }
% if SKIP == "block":
        most = lanes_max(most, scratch + slot * ${LANES + MOST_STAGE}, lane);
        if (most.x > GRADIENT_MAX) {
            if (lane == 0) {
                ${block_left_out()}
            }
            count = 0;
        }
% endif
        uchar4 m_codes, s_codes;
        const float2 new_m_pair = profile_encode(new_m, lane, units, profiles + slot * PROFILE_SCRATCH, &m_codes);
        const float2 new_s_pair = profile_encode(new_s, lane, units, profiles + slot * PROFILE_SCRATCH, &s_codes);
        if (j < count) {
            ${put_weight("new_p", "j", "count - j")};
            ${put_profile("m_codes", "exp_avg", "j")}
            ${put_profile("s_codes", "exp_avg_sq", "j")}
        }
        // All have read the pairs.
        barrier(CLK_GLOBAL_MEM_FENCE);
        if (lane == 0 && count) {
            vstore2(new_m_pair, within, exp_avg_scale);
            vstore2(new_s_pair, within, exp_avg_sq_scale);
        }
    }
% else:
    ${blocks_begin()}
        ${flags_known()}
        ${gradients_known()}
        const float2 m_pair = vload2(within, exp_avg_scale);
        const float2 s_pair = vload2(within, exp_avg_sq_scale);
        const float s_least = profile_least(s_pair, 1);
        float held_m[256], held_s[256];
        uchar codes[256];
        uint held = 0;
        for (; held < count; held += 8) {
            ${profile_updated("held")}
            ${put_weight("p", "held", "count - held")};
            vstore8(m, 0, held_m + held);
            vstore8(s, 0, held_s + held);
        }
        for (; held < 256; held += 8) {
            vstore8((vec)(0.0f), 0, held_m + held);
            vstore8((vec)(0.0f), 0, held_s + held);
        }
        vstore2(profile_encode(held_m, count, codes), within, exp_avg_scale);
        for (uint j = 0; j < count; j += 8) {
            ${put_profile("vload8(0, codes + j)", "exp_avg", "j")}
        }
        vstore2(profile_encode(held_s, count, codes), within, exp_avg_sq_scale);
        for (uint j = 0; j < count; j += 8) {
            ${put_profile("vload8(0, codes + j)", "exp_avg_sq", "j")}
        }
    }
% endif
