"""Which measured operation stands for which others: `whale profile` times a few operations, and
others are taken to need the time of one that works alike.
"""

from __future__ import annotations

from whale.operations.row import add_rows

add_rows("addmm mm einsum bilinear addbmm tensordot lstm gru rnn_tanh rnn_relu", timed_as="linear")
add_rows("bmm baddbmm _grouped_mm expert_mm mv dot", timed_as="matmul")
add_rows("conv1d conv3d conv_transpose1d conv_transpose2d conv_transpose3d", timed_as="conv2d")
add_rows("div where masked_fill dropout native_dropout", timed_as="mul")
add_rows(
    "neg clone _to_copy to type_as abs sign ge le gt lt eq ne hardtanh leaky_relu",
    timed_as="relu",
)
add_rows("erf exp log sigmoid silu softplus mish logsigmoid elu", timed_as="gelu")
add_rows("sin cos", timed_as="tanh")
add_rows("sqrt rsqrt reciprocal", timed_as="pow")
add_rows("log_softmax _safe_softmax logsumexp", timed_as="softmax")
add_rows("rms_norm group_norm native_layer_norm", timed_as="layer_norm")
add_rows("_native_batch_norm_legit native_batch_norm instance_norm", timed_as="batch_norm")
add_rows(
    "mean amax max min argmax var norm linalg_vector_norm avg_pool2d adaptive_avg_pool2d",
    timed_as="sum",
)
add_rows("max_pool2d_with_indices max_pool1d", timed_as="max_pool2d")
add_rows("nll_loss nll_loss_nd mse_loss l1_loss", timed_as="cross_entropy_loss")
add_rows("index gather index_select take_along_dim", timed_as="embedding")
add_rows("contiguous cat stack pad constant_pad_nd repeat roll flip", timed_as="transposed_copy")
