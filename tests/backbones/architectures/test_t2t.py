"""Performer, positions and attention of T2T-ViT-14 equal their formulas."""

import math

import timm
import torch

from frugalvit.backbones.architectures.t2t import Performer, sinusoids


def test_performer_equals_its_formula():
    torch.manual_seed(0)
    performer = Performer(in_dim=12, dim=8).eval()
    x = torch.randn(2, 5, 12)
    with torch.no_grad():
        keys, queries, values = performer.kqv(performer.norm1(x)).chunk(3, dim=-1)
        expected = torch.empty(2, 5, 8)
        for image in range(2):
            for token in range(5):

                def phi(vector: torch.Tensor) -> torch.Tensor:
                    return torch.exp(performer.w @ vector - vector @ vector / 2) / math.sqrt(4)

                similar = torch.stack([phi(queries[image, token]) @ phi(keys[image, other]) for other in range(5)])
                mixed = (similar / similar.sum()) @ values[image]
                inner = values[image, token] + performer.proj(mixed)
                expected[image, token] = inner + performer.mlp(performer.norm2(inner))
        torch.testing.assert_close(performer(x), expected)
    rows = performer.w @ performer.w.T
    torch.testing.assert_close(rows, 4 * torch.eye(4), rtol=1e-4, atol=1e-4)


def test_performer_approximates_softmax_attention():
    """With many random features the estimate is close to softmax attention."""
    torch.manual_seed(0)
    performer = Performer(in_dim=4, dim=4, kernel_ratio=5000)
    performer.w.data.normal_()
    performer.features = 20000
    keys, queries = torch.randn(2, 6, 4) / 4
    estimate = performer.phi(queries) @ performer.phi(keys).T
    torch.testing.assert_close(estimate, (queries @ keys.T).exp(), rtol=0.1, atol=0.05)


def test_positions_are_sinusoids():
    table = sinusoids(5, 6)[0]
    for position in range(5):
        for channel in range(6):
            angle = position / 10000 ** (2 * (channel // 2) / 6)
            expected = math.sin(angle) if channel % 2 == 0 else math.cos(angle)
            assert abs(table[position, channel].item() - expected) < 1e-6


def test_positions_are_unchanged_at_the_built_size():
    model = timm.create_model("t2t_vit_14", img_size=(48, 80), embed_dim=8, depth=1, num_heads=2, token_dim=4)
    assert model.grid_size == (3, 5)
    torch.testing.assert_close(model.pos_embed, sinusoids(1 + 15, 8))
    tokens, height, width = model.embed(torch.zeros(1, 3, 48, 80))
    plain = model.tokens_to_token(torch.zeros(1, 3, 48, 80))[0]
    assert (height, width) == (3, 5)
    torch.testing.assert_close(tokens[:, 1:], plain + model.pos_embed[:, 1:])


def test_attention_equals_queries_times_keys():
    torch.manual_seed(0)
    model = timm.create_model("t2t_vit_14", embed_dim=8, depth=2, num_heads=2, token_dim=4).eval()
    images = torch.randn(1, 3, 32, 48)
    with torch.no_grad():
        attention = model.last_attention(images)
        block = model.blocks[-1]
        tokens = block.norm1(model.run_blocks(images, stop_before=len(model.blocks) - 1)[0])
        q, k, v = model.blocks[-1].attn.qkv(tokens).chunk(3, dim=-1)
        out = torch.empty_like(q)
        for head in range(2):
            channels = slice(4 * head, 4 * head + 4)
            weights = (q[0, :, channels] @ k[0, :, channels].T / 2).softmax(-1)
            torch.testing.assert_close(attention[0, head], weights)
            out[0, :, channels] = weights @ v[0, :, channels]
        torch.testing.assert_close(block.attn(tokens), block.attn.proj(out))
