"""The attention of the windowed CvT equals loops over positions."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from frugalvit.backbones.architectures.cvt_windowed import WindowAttention


def attention_by_loops(layer: WindowAttention, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Masked form: a loop over positions, each with the existing positions of its window."""
    batch, dim, height, width = x.shape
    tall, wide = min(layer.window, height), min(layer.window, width)
    queries, keys, values = layer.qkv(x).flatten(2).chunk(3, dim=1)
    head_dim = dim // layer.heads
    weights = x.new_zeros(batch, layer.heads, height * width, height * width)
    out = torch.zeros_like(queries)
    for head in range(layer.heads):
        channels = slice(head * head_dim, (head + 1) * head_dim)
        for q in range(height * width):
            row, column = divmod(q, width)
            seen = [
                k
                for k in range(height * width)
                if k // width // tall == row // tall and k % width // wide == column // wide
            ]
            scores = torch.einsum("bd,bdk->bk", queries[:, channels, q], keys[:, channels][:, :, seen]) * dim**-0.5
            if layer.relative_position_bias_table is not None:
                reach = layer.window - 1
                entries = [(row - k // width + reach) * (2 * reach + 1) + column - k % width + reach for k in seen]
                scores = scores + layer.relative_position_bias_table[entries, head]
            probabilities = scores.softmax(-1)
            weights[:, head, q, seen] = probabilities
            out[:, channels, q] = torch.einsum("bk,bdk->bd", probabilities, values[:, channels][:, :, seen])
    return layer.proj_out(out.view(batch, dim, height, width)), weights


@given(height=st.integers(1, 8), width=st.integers(1, 8), window=st.integers(1, 4), relative_bias=st.booleans())
def test_masked_attention_equals_loops(height, width, window, relative_bias):
    torch.manual_seed(0)
    layer = WindowAttention(8, 2, window, relative_bias, "masked").double().eval()
    x = torch.randn(2, 8, height, width, dtype=torch.float64, requires_grad=True)
    expected, weights = attention_by_loops(layer, x)
    out = layer(x)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(layer.attention(x).double(), weights, rtol=1e-5, atol=1e-6)
    direction = torch.randn_like(out)
    (fast,) = torch.autograd.grad(out, x, direction)
    (slow,) = torch.autograd.grad(expected, x, direction)
    torch.testing.assert_close(fast, slow)


def test_padding_matters_only_in_the_released_form():
    """Both forms are equal if windows divide the map, and differ otherwise."""
    torch.manual_seed(0)
    masked = WindowAttention(8, 2, 4, True, "masked").eval()
    zeros = WindowAttention(8, 2, 4, True, "zeros").eval()
    zeros.load_state_dict(masked.state_dict())
    for side, same in ((8, True), (3, True), (6, False)):
        x = torch.randn(1, 8, side, side)
        assert torch.allclose(masked(x), zeros(x), atol=1e-6) == same
        torch.testing.assert_close(zeros.attention(x).sum(-1), torch.ones(1, 2, side * side))


def test_padding_does_not_change_batch_statistics():
    """In training the masked form normalizes over the positions of the map only."""
    torch.manual_seed(0)
    layer = WindowAttention(8, 2, 4, True, "masked").train()
    x = torch.randn(3, 8, 5, 6)
    layer(x)
    seen = layer.qkv.dw(x).mean((0, 2, 3))
    torch.testing.assert_close(layer.qkv.bn.running_mean, 0.1 * seen)
