// The step of kernels/adam.cl on moments in float32, which have no scales: blocks are what an item or a group takes at a time.
    ${blocks_begin()}
        ${flags_known()}
        ${vectors_begin()}
            ${weight_and_gradient("j", "count - j")}
            vec m = load_left_float32(exp_avg + at + j, count - j, 0.0f);
            vec v = load_left_float32(exp_avg_sq + at + j, count - j, 0.0f);
            adam_update(g, &p, &m, &v, rule);
            ${put_weight("p", "j", "count - j")};
            store_left_float32(exp_avg + at + j, count - j, m);
            store_left_float32(exp_avg_sq + at + j, count - j, v);
        }
    }
