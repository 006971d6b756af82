"""torch's ops (by their names in op_db) that run on the device alone: all samples, forward and gradients.

A name belongs here as soon as it passes uncapped on every platform (`python -m tests.opdb --exact NAME`), and one that
falls back to the host later is a failure of the tests. What cannot be compared at all is in `opdb.INCOMPARABLE`.
"""

_FLOAT32 = """
    H T __getitem__ __radd__ __rdiv__ __rmatmul__ __rmod__ __rmul__ __rpow__ __rsub__ _chunk_cat
    _native_batch_norm_legit _softmax_backward_data _unsafe_masked_index _unsafe_masked_index_put_accumulate abs
    acos acosh add addbmm addcdiv addcmul addmm addmm.decomposed addmv addr alias_copy all allclose amax amin
    aminmax angle any arange argmax argmin argsort argwhere as_strided as_strided.partial_views as_strided_copy
    as_strided_scatter asin asinh atan atan2 atanh atleast_1d atleast_2d atleast_3d baddbmm bfloat16 block_diag
    bmm bmm.triton_optimized bool broadcast_shapes broadcast_tensors broadcast_to bucketize byte cartesian_prod
    cat ceil char chunk clamp clamp_max clamp_min clone column_stack combinations conj conj_physical
    constant_pad_nd contiguous copysign corrcoef cos cosh count_nonzero cov cross cummax cummin cumprod cumsum
    cumulative_trapezoid deg2rad diag diag_embed diagflat diagonal diagonal_copy diagonal_scatter diff dist
    div.floor_rounding div.no_rounding_mode div.trunc_rounding dot dsplit dstack einsum eq equal erf erfc exp exp2
    expand expand_as expand_copy expm1 eye fft.fftshift fft.ifftshift fill flatten flip fliplr flipud float floor
    floor_divide fmax fmin fmod frac full full_like gather ge gradient gt half heaviside hsplit hstack hypot
    index_add index_copy index_put index_select inner int isclose isfinite isin isinf isnan isneginf isposinf
    isreal item kron kthvalue ldexp le lerp linalg.cross linalg.diagonal linalg.multi_dot linalg.vander
    linalg.vecdot linalg.vector_norm linspace linspace.tensor_overload log log10 log1p log2 log_softmax logaddexp
    logaddexp2 logical_and logical_not logical_or logical_xor logit logspace logspace.tensor_overload logsumexp
    long lt mH mT masked.amax masked.amin masked.argmax masked.argmin masked.cumprod masked.cumsum
    masked.log_softmax masked.logaddexp masked.logsumexp masked.mean masked.norm masked.normalize masked.prod
    masked.softmax masked.softmin masked.std masked.sum masked.var masked_fill masked_scatter masked_select matmul
    max.binary max.reduction_no_dim max.reduction_with_dim maximum mean meshgrid.list_of_tensors
    meshgrid.variadic_tensors min.binary min.reduction_no_dim min.reduction_with_dim minimum mm movedim msort mul
    mv nan_to_num nanmean nanquantile nansum narrow narrow_copy native_batch_norm native_dropout_backward
    native_group_norm native_layer_norm ne neg new_full new_ones new_zeros nextafter
    nn.functional.binary_cross_entropy nn.functional.binary_cross_entropy_with_logits nn.functional.celu
    nn.functional.channel_shuffle nn.functional.cosine_embedding_loss nn.functional.cosine_similarity
    nn.functional.cross_entropy nn.functional.elu nn.functional.embedding
    nn.functional.feature_alpha_dropout.without_train nn.functional.gaussian_nll_loss nn.functional.gelu
    nn.functional.glu nn.functional.group_norm nn.functional.hardshrink nn.functional.hardsigmoid
    nn.functional.hardswish nn.functional.hardtanh nn.functional.hinge_embedding_loss nn.functional.huber_loss
    nn.functional.instance_norm nn.functional.kl_div nn.functional.l1_loss nn.functional.layer_norm
    nn.functional.leaky_relu nn.functional.linear nn.functional.linear_cross_entropy nn.functional.logsigmoid
    nn.functional.margin_ranking_loss nn.functional.mish nn.functional.mse_loss
    nn.functional.multilabel_soft_margin_loss nn.functional.nll_loss nn.functional.normalize
    nn.functional.pad.circular nn.functional.pad.constant nn.functional.pad.reflect
    nn.functional.pairwise_distance nn.functional.pixel_shuffle nn.functional.pixel_unshuffle
    nn.functional.poisson_nll_loss nn.functional.prelu nn.functional.relu nn.functional.relu6
    nn.functional.rms_norm nn.functional.scaled_dot_product_attention nn.functional.selu nn.functional.silu
    nn.functional.smooth_l1_loss nn.functional.soft_margin_loss nn.functional.softmin nn.functional.softplus
    nn.functional.softshrink nn.functional.softsign nn.functional.tanhshrink nn.functional.threshold
    nn.functional.triplet_margin_loss nn.functional.triplet_margin_with_distance_loss nn.functional.unfold nonzero
    norm norm.fro norm.inf ones ones_like outer permute permute_copy positive pow prod put quantile rad2deg ravel
    real reciprocal remainder repeat repeat_interleave reshape reshape_as resize_ resize_as_ resolve_conj
    resolve_neg roll rot90 round round.decimals_0 round.decimals_3 round.decimals_neg_3 rsqrt rsub scalar_tensor
    scatter scatter_add searchsorted select select_scatter sgn short sigmoid sign signal.windows.bartlett
    signal.windows.blackman signal.windows.cosine signal.windows.exponential signal.windows.gaussian
    signal.windows.general_cosine signal.windows.general_hamming signal.windows.hamming signal.windows.hann
    signal.windows.nuttall signbit sin sinc sinh slice slice_scatter softmax sort special.entr special.ndtr
    special.xlog1py split split.list_args split_with_sizes split_with_sizes_copy sqrt square squeeze
    squeeze.multiple squeeze_copy stack std std.unbiased std_mean std_mean.unbiased sub sum sum_to_size t t_copy
    take take_along_dim tan tanh tensor_split tensordot tile topk torch.ops.aten._safe_softmax.default trace
    transpose transpose_copy trapezoid trapz tril triu true_divide trunc unbind unbind_copy unflatten unfold
    unfold_copy unsafe_chunk unsafe_split unsqueeze unsqueeze_copy var var.unbiased var_mean var_mean.unbiased
    vdot view view_as view_copy vsplit vstack where xlogy zero_ zeros zeros_like
"""

_BFLOAT16 = """
    H T __getitem__ __radd__ __rdiv__ __rmatmul__ __rmod__ __rmul__ __rpow__ __rsub__ _chunk_cat
    _softmax_backward_data _unsafe_masked_index abs acos acosh add addcdiv addcmul addmm addmm.decomposed addmv
    alias_copy all allclose amax amin aminmax angle any arange argmax argmin argwhere as_strided
    as_strided.partial_views as_strided_copy as_strided_scatter asin asinh atan atan2 atanh atleast_1d atleast_2d
    atleast_3d baddbmm bfloat16 block_diag bmm bmm.triton_optimized bool broadcast_tensors broadcast_to bucketize
    byte cartesian_prod cat ceil char chunk clamp clamp_max clamp_min clone column_stack combinations conj
    conj_physical constant_pad_nd contiguous copysign corrcoef cos cosh count_nonzero cov cummax cummin cumprod
    cumsum cumulative_trapezoid deg2rad diag diag_embed diagflat diagonal diagonal_copy diagonal_scatter diff dist
    div.floor_rounding div.no_rounding_mode dot dsplit dstack einsum eq equal erf erfc exp exp2 expand expand_as
    expand_copy expm1 eye fft.fftshift fft.ifftshift fill flatten flip fliplr flipud float floor floor_divide fmax
    fmin frac full full_like gather ge gradient gt half heaviside hsplit hstack hypot index_add index_copy
    index_put index_select inner int isclose isfinite isin isinf isnan isneginf isposinf isreal item kron kthvalue
    ldexp le lerp linalg.diagonal linalg.multi_dot linalg.vecdot linalg.vector_norm log log10 log1p log2
    log_softmax logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit logsumexp long lt mH mT
    masked.amax masked.amin masked.argmax masked.argmin masked.cumprod masked.cumsum masked.logaddexp
    masked.logsumexp masked.mean masked.norm masked.normalize masked.prod masked.softmax masked.softmin masked.std
    masked.sum masked.var masked_fill masked_scatter masked_select matmul max.binary max.reduction_no_dim
    max.reduction_with_dim maximum mean meshgrid.list_of_tensors meshgrid.variadic_tensors min.binary
    min.reduction_no_dim min.reduction_with_dim minimum mm movedim mul mv nan_to_num nanmean nansum narrow
    narrow_copy native_dropout_backward ne neg new_full new_ones new_zeros nn.functional.binary_cross_entropy
    nn.functional.binary_cross_entropy_with_logits nn.functional.celu nn.functional.channel_shuffle
    nn.functional.cosine_embedding_loss nn.functional.cosine_similarity nn.functional.cross_entropy
    nn.functional.elu nn.functional.embedding nn.functional.feature_alpha_dropout.without_train
    nn.functional.gaussian_nll_loss nn.functional.gelu nn.functional.glu nn.functional.hardshrink
    nn.functional.hardsigmoid nn.functional.hardswish nn.functional.hardtanh nn.functional.hinge_embedding_loss
    nn.functional.huber_loss nn.functional.kl_div nn.functional.l1_loss nn.functional.layer_norm
    nn.functional.leaky_relu nn.functional.linear nn.functional.logsigmoid nn.functional.margin_ranking_loss
    nn.functional.mish nn.functional.mse_loss nn.functional.multilabel_soft_margin_loss nn.functional.nll_loss
    nn.functional.pad.circular nn.functional.pad.constant nn.functional.pairwise_distance
    nn.functional.pixel_shuffle nn.functional.pixel_unshuffle nn.functional.poisson_nll_loss nn.functional.prelu
    nn.functional.relu nn.functional.relu6 nn.functional.rms_norm nn.functional.selu nn.functional.silu
    nn.functional.smooth_l1_loss nn.functional.soft_margin_loss nn.functional.softmin nn.functional.softplus
    nn.functional.softshrink nn.functional.softsign nn.functional.tanhshrink nn.functional.threshold
    nn.functional.triplet_margin_loss nn.functional.triplet_margin_with_distance_loss nonzero norm norm.fro
    norm.inf ones ones_like outer permute permute_copy positive pow prod put rad2deg ravel real reciprocal
    remainder repeat repeat_interleave reshape reshape_as resize_ resize_as_ resolve_conj resolve_neg roll rot90
    round round.decimals_0 round.decimals_3 round.decimals_neg_3 rsqrt rsub scalar_tensor scatter scatter_add
    searchsorted select select_scatter sgn short sigmoid sign signbit sin sinc sinh slice slice_scatter softmax
    special.entr special.ndtr split split.list_args split_with_sizes split_with_sizes_copy sqrt square squeeze
    squeeze.multiple squeeze_copy stack std std.unbiased std_mean std_mean.unbiased sub sum sum_to_size t t_copy
    take take_along_dim tan tanh tensor_split tensordot tile torch.ops.aten._safe_softmax.default trace transpose
    transpose_copy trapezoid trapz tril triu true_divide trunc unbind unbind_copy unflatten unfold unfold_copy
    unsafe_chunk unsafe_split unsqueeze unsqueeze_copy var var.unbiased var_mean var_mean.unbiased vdot view
    view_as view_copy vsplit vstack where xlogy zero_ zeros zeros_like
"""

#: In float32.
FLOAT32 = tuple(_FLOAT32.split())
#: In bfloat16 too.
BFLOAT16 = tuple(_BFLOAT16.split())
