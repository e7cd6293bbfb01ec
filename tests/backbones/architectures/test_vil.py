"""The attention of ViL equals loops over tokens, at every size."""

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st

from frugalvit.backbones.architectures.vil import FullAttention, SparseAttention
from frugalvit.errors import UserError


def sparse_by_loops(layer: SparseAttention, x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """A loop over tokens: a local token attends to the global ones, its window and the eight around it."""
    count, side, reach = layer.global_tokens, layer.window, layer.reach
    queries, (keys, values) = layer.query(x), layer.kv(x).chunk(2, dim=-1)
    head_dim = x.shape[-1] // layer.heads
    out = torch.zeros_like(queries)
    for head in range(layer.heads):
        channels = slice(head * head_dim, (head + 1) * head_dim)
        for q in range(x.shape[1]):
            attended, biases = [], []
            for k in range(x.shape[1]):
                if q < count and k < count:
                    bias = layer.g2g_relative_position_bias[head, q, k]
                elif q < count:
                    bias = layer.g2l_relative_position_bias[0, head, q]
                elif k < count:
                    bias = layer.g2l_relative_position_bias[1, head, k]
                else:
                    (q_row, q_column), (k_row, k_column) = divmod(q - count, width), divmod(k - count, width)
                    if max(abs(k_row // side - q_row // side), abs(k_column // side - q_column // side)) > 1:
                        continue
                    entry = (q_row - k_row + reach) * (2 * reach + 1) + q_column - k_column + reach
                    bias = layer.local_relative_position_bias_table[entry, head]
                attended.append(k)
                biases.append(bias)
            scores = torch.einsum("bd,bkd->bk", queries[:, q, channels], keys[:, attended][..., channels])
            weights = (scores * head_dim**-0.5 + torch.stack(biases)).softmax(-1)
            out[:, q, channels] = torch.einsum("bk,bkd->bd", weights, values[:, attended][..., channels])
    return layer.proj(out)


@given(height=st.integers(1, 9), width=st.integers(1, 9), window=st.integers(1, 3), global_tokens=st.integers(0, 2))
def test_sparse_attention_equals_loops_with_gradients(height, width, window, global_tokens):
    torch.manual_seed(0)
    layer = SparseAttention(4, 2, window, global_tokens).double()
    x = torch.randn(2, global_tokens + height * width, 4, dtype=torch.float64, requires_grad=True)
    out = layer(x, height, width)
    expected = sparse_by_loops(layer, x, height, width)
    torch.testing.assert_close(out, expected)
    direction = torch.randn_like(out)
    inputs = [x, *layer.parameters()]
    for fast, slow in zip(
        torch.autograd.grad(out, inputs, direction), torch.autograd.grad(expected, inputs, direction), strict=True
    ):
        torch.testing.assert_close(fast, slow)


@pytest.mark.parametrize(("height", "width"), [(3, 3), (2, 3), (1, 1), (4, 6)])
def test_far_offsets_use_the_edge_of_the_table(height, width):
    torch.manual_seed(0)
    layer = FullAttention(4, 2, side=3, global_tokens=1, bias_resize="table")
    bias = layer.bias(height, width)[0]
    for head in range(2):
        assert bias[head, 0, 0] == layer.g2g_relative_position_bias[head, 0, 0]
        assert (bias[head, 0, 1:] == layer.g2l_relative_position_bias[0, head, 0]).all()
        assert (bias[head, 1:, 0] == layer.g2l_relative_position_bias[1, head, 0]).all()
        for q in range(height * width):
            for k in range(height * width):
                rows, columns = q // width - k // width, q % width - k % width
                rows, columns = max(-2, min(2, rows)), max(-2, min(2, columns))
                expected = layer.local_relative_position_bias_table[(rows + 2) * 5 + columns + 2, head]
                assert bias[head, 1 + q, 1 + k] == expected


def test_attention_equals_queries_times_keys():
    torch.manual_seed(0)
    layer = FullAttention(8, 2, side=3, global_tokens=1, bias_resize="table")
    x = torch.randn(1, 1 + 6, 8)
    with torch.no_grad():
        attention = layer.attention(x, 2, 3)
        q, k, v = layer.qkv(x).chunk(3, dim=-1)
        out = torch.empty_like(q)
        for head in range(2):
            channels = slice(4 * head, 4 * head + 4)
            scores = q[0, :, channels] @ k[0, :, channels].T / 2 + layer.bias(2, 3)[0, head]
            torch.testing.assert_close(attention[0, head], scores.softmax(-1))
            out[0, :, channels] = scores.softmax(-1) @ v[0, :, channels]
        torch.testing.assert_close(layer(x, 2, 3), layer.proj(out))


def test_sparse_last_stage_has_no_attention_map():
    model = timm.create_model("vil_tiny_w7", embed_dim=8, depths=(1, 1), num_heads=(1, 1), sparse_stages=2)
    with pytest.raises(UserError, match="sparse"):
        model.last_attention(torch.randn(1, 3, 32, 32))
