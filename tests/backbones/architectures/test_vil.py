"""ViL: the released numbers, sparse attention against loops over tokens, biases at every size, random neighbours."""

from __future__ import annotations

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st

from frugalvit.backbones.architectures.vil import FullAttention, SparseAttention, checkpoint_filter_fn
from frugalvit.errors import UserError


def released(arrays, **keywords):
    model = timm.create_model(
        "vil_tiny_w7", embed_dim=16, depths=(2, 2, 2, 2), num_heads=(2, 4, 8, 8), num_classes=0, **keywords
    )
    weights = {key[2:]: torch.from_numpy(value).float() for key, value in arrays.items() if key.startswith("w.")}
    model.load_state_dict(weights)
    return model.eval()


@pytest.mark.parametrize("size", [224, 96])
def test_equals_the_released_network(golden, size):
    arrays = golden("d_vil")
    model = released(arrays, bias_resize="matrix")
    images = torch.from_numpy(arrays[f"img{size}"]).float()
    states = []
    with torch.no_grad():
        grid, pooled = model.forward_grid(images)
        model.run_blocks(images, states.append)
        # The released probe takes the global token in stage 3 and the mean of the normed tokens in stage 4.
        stage3 = [tokens[:, 0] for tokens, _, _ in states[-4:-2]]
        stage4 = [model.norm(tokens).mean(1) for tokens, _, _ in states[-2:]]
    close = {"rtol": 0, "atol": 1e-4}
    torch.testing.assert_close(pooled, torch.from_numpy(arrays[f"img{size}.view"]), **close)
    torch.testing.assert_close(grid.flatten(2).mT, torch.from_numpy(arrays[f"img{size}.region"]), **close)
    torch.testing.assert_close(torch.cat(stage3 + stage4, 1), torch.from_numpy(arrays[f"img{size}.last4"]), **close)


def test_both_resizes_agree_at_224_px(golden):
    arrays = golden("d_vil")
    model = released(arrays, bias_resize="table")
    with torch.no_grad():
        pooled = model.forward_grid(torch.from_numpy(arrays["img224"]).float())[1]
    torch.testing.assert_close(pooled, torch.from_numpy(arrays["img224.view"]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("bias_resize", ["table", "matrix"])
@pytest.mark.parametrize("size", [(32, 32), (64, 64), (128, 128), (256, 256), (72, 200)])
def test_sizes_at_which_the_released_network_fails(size, bias_resize):
    model = timm.create_model(
        "vil_tiny_w7", embed_dim=8, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1), bias_resize=bias_resize
    ).eval()
    with torch.no_grad():
        grid = model.forward_grid(torch.randn(1, 3, *size))[0]
    assert grid.isfinite().all()
    assert grid.shape[2:] == tuple(-(-side // 32) for side in size)


def sparse_by_loops(
    layer: SparseAttention, x: torch.Tensor, height: int, width: int, seen_offsets: set[tuple[int, int]]
) -> torch.Tensor:
    """Token by token: a local token sees the global ones and the windows at the given offsets from its own."""
    count, side, reach = layer.global_tokens, layer.window, layer.reach
    queries, (keys, values) = layer.query(x), layer.kv(x).chunk(2, dim=-1)
    head_dim = x.shape[-1] // layer.heads
    out = torch.zeros_like(queries)
    for head in range(layer.heads):
        channels = slice(head * head_dim, (head + 1) * head_dim)
        for q in range(x.shape[1]):
            seen, biases = [], []
            for k in range(x.shape[1]):
                if q < count and k < count:
                    bias = layer.g2g_relative_position_bias[head, q, k]
                elif q < count:
                    bias = layer.g2l_relative_position_bias[0, head, q]
                elif k < count:
                    bias = layer.g2l_relative_position_bias[1, head, k]
                else:
                    (q_row, q_column), (k_row, k_column) = divmod(q - count, width), divmod(k - count, width)
                    if (k_row // side - q_row // side, k_column // side - q_column // side) not in seen_offsets:
                        continue
                    entry = (q_row - k_row + reach) * (2 * reach + 1) + q_column - k_column + reach
                    bias = layer.local_relative_position_bias_table[entry, head]
                seen.append(k)
                biases.append(bias)
            scores = torch.einsum("bd,bkd->bk", queries[:, q, channels], keys[:, seen][..., channels])
            weights = (scores * head_dim**-0.5 + torch.stack(biases)).softmax(-1)
            out[:, q, channels] = torch.einsum("bk,bkd->bd", weights, values[:, seen][..., channels])
    return layer.proj(out)


ALL = {(row, column) for row in (-1, 0, 1) for column in (-1, 0, 1)}


@given(height=st.integers(1, 9), width=st.integers(1, 9), window=st.integers(1, 3), global_tokens=st.integers(0, 2))
def test_sparse_attention_is_the_loop_over_tokens(height, width, window, global_tokens):
    torch.manual_seed(0)
    layer = SparseAttention(4, 2, window, global_tokens, "all").double()
    x = torch.randn(2, global_tokens + height * width, 4, dtype=torch.float64, requires_grad=True)
    out = layer(x, height, width)
    expected = sparse_by_loops(layer, x, height, width, ALL)
    torch.testing.assert_close(out, expected)
    direction = torch.randn_like(out)
    wanted = [x, *layer.parameters()]
    for fast, slow in zip(
        torch.autograd.grad(out, wanted, direction), torch.autograd.grad(expected, wanted, direction), strict=True
    ):
        torch.testing.assert_close(fast, slow)


def test_random_neighbours_are_one_window_at_a_time():
    torch.manual_seed(0)
    layer = SparseAttention(4, 2, 2, 1, "random").double()
    x = torch.randn(2, 1 + 30, 4, dtype=torch.float64)
    others = sorted(ALL - {(0, 0)})
    met = set()
    for seed in range(40):
        torch.manual_seed(seed)
        out = layer(x, 5, 6)
        torch.manual_seed(seed)
        torch.testing.assert_close(layer(x, 5, 6), out, rtol=0, atol=0)
        fitting = [
            offset
            for offset in others
            if offset not in met and torch.allclose(out, sparse_by_loops(layer, x, 5, 6, {(0, 0), offset}))
        ]
        met.update(fitting)
        if len(met) == 8:
            break
    assert met == set(others)
    torch.testing.assert_close(layer.eval()(x, 5, 6), sparse_by_loops(layer, x, 5, 6, ALL))


@pytest.mark.parametrize(("height", "width"), [(3, 3), (2, 3), (1, 1), (4, 6)])
def test_full_attention_looks_offsets_up_and_repeats_the_edge(height, width):
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


def test_attention_is_recomputed_from_queries_and_keys():
    torch.manual_seed(0)
    layer = FullAttention(8, 2, side=3, global_tokens=1, bias_resize="table")
    x = torch.randn(1, 1 + 6, 8)
    with torch.no_grad():
        given_weights = layer.attention(x, 2, 3)
        q, k, v = layer.qkv(x).chunk(3, dim=-1)
        out = torch.empty_like(q)
        for head in range(2):
            channels = slice(4 * head, 4 * head + 4)
            scores = q[0, :, channels] @ k[0, :, channels].T / 2 + layer.bias(2, 3)[0, head]
            torch.testing.assert_close(given_weights[0, head], scores.softmax(-1))
            out[0, :, channels] = scores.softmax(-1) @ v[0, :, channels]
        torch.testing.assert_close(layer(x, 2, 3), layer.proj(out))


def test_released_doubles_are_left_out():
    names = ["layer1.1.attn.query.weight", "layer1.1.attn.query_global.weight", "layer1.1.attn.relative_position_index"]
    kept = checkpoint_filter_fn({name: torch.zeros(1) for name in names}, torch.nn.Identity())
    assert list(kept) == names[:1]


def test_sparse_end_has_no_attention_map():
    model = timm.create_model("vil_tiny_w7", embed_dim=8, depths=(1, 1), num_heads=(1, 1), sparse_stages=2)
    with pytest.raises(UserError, match="sparse"):
        model.last_attention(torch.randn(1, 3, 32, 32))


@pytest.mark.parametrize("wrong", [{"neighbours": "some"}, {"bias_resize": "picture"}])
def test_unknown_forms_are_said(wrong):
    with pytest.raises(UserError, match="as released EsViT"):
        timm.create_model("vil_tiny_w7", **wrong)
