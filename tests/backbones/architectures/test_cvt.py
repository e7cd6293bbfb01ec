"""The norm and the attention of CvT-13 equal their formulas."""

import pytest
import timm
import torch
import torch.nn.functional as F

from frugalvit.backbones.architectures.cvt import ChannelNorm, ConvAttention


def test_channel_norm_divides_by_the_deviation_plus_eps():
    torch.manual_seed(0)
    norm = ChannelNorm(6).double()
    torch.nn.init.normal_(norm.g)
    torch.nn.init.normal_(norm.b)
    x = torch.randn(2, 6, 3, 4, dtype=torch.double)
    expected = torch.empty_like(x)
    for image in range(2):
        for row in range(3):
            for column in range(4):
                values = x[image, :, row, column].numpy()
                expected[image, :, row, column] = torch.from_numpy((values - values.mean()) / (values.std() + 1e-5))
    expected = expected * norm.g + norm.b
    torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)


def test_channel_norm_of_a_blank_image_has_finite_gradients():
    x = torch.full((1, 6, 2, 2), 0.5, requires_grad=True)
    norm = ChannelNorm(6)
    norm(x).square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("size", [(4, 4), (5, 7), (1, 3)])
def test_attention_equals_queries_times_keys(size):
    torch.manual_seed(0)
    attention = ConvAttention(dim=8, heads=2, head_dim=4, key_stride=2, drop=0.0).eval()
    x = torch.randn(2, 8, *size)
    with torch.no_grad():
        queries = attention.to_q(x)
        keys, values = attention.to_kv(x).chunk(2, dim=1)
        attended = attention.attention(x)
        out = attention(x)
    height, width = size
    expected_out = torch.zeros(2, 8, height, width)
    for image in range(2):
        for head in range(2):
            channels = slice(4 * head, 4 * head + 4)
            for row in range(height):
                for column in range(width):
                    query = queries[image, channels, row, column]
                    scores = torch.einsum("d,dhw->hw", query, keys[image, channels]) / 2
                    weights = scores.flatten().softmax(0).view_as(scores)
                    expected_out[image, channels, row, column] = torch.einsum(
                        "hw,dhw->d", weights, values[image, channels]
                    )
                    # Summed over the cells of a key, the full map gives the key's weight.
                    cells = attended[image, head, row * width + column].view(1, 1, height, width)
                    summed = F.avg_pool2d(F.pad(cells, (0, width % 2, 0, height % 2)), 2) * 4
                    torch.testing.assert_close(summed[0, 0], weights)
    torch.testing.assert_close(out, attention.to_out(expected_out))


def test_one_width_keeps_the_published_ratios():
    model = timm.create_model("cvt_13", embed_dim=8, depths=(1, 1, 1))
    assert [stage["num_chs"] for stage in model.feature_info] == [8, 24, 48]
