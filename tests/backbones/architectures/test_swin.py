"""Our Swin equals timm's Swin, and attention written as loops."""

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from frugalvit.backbones.architectures.swin import Block, SwinTransformer
from frugalvit.backbones.architectures.windows import mask, plan_windows, window_partition, window_reverse
from frugalvit.errors import UserError

TINY = {"embed_dim": 24, "depths": (2, 2, 2, 2), "num_heads": (2, 4, 8, 16)}


def test_equals_timm_if_windows_divide_every_map() -> None:
    theirs = timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, drop_path_rate=0.0, **TINY)
    ours = SwinTransformer(num_classes=5, drop_path_rate=0.0, norm_eps=1e-5, **TINY)
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 224, 224)
    for model in (theirs, ours):
        model(images).square().sum().backward()
    torch.testing.assert_close(ours(images), theirs(images), atol=1e-5, rtol=1e-5)
    for (name, parameter), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, atol=1e-5, rtol=1e-4, msg=name)


def attention_by_loops(block: Block, tokens: Tensor) -> Tensor:
    """Window attention token by token, without padding; the windows start ``shift`` tokens before the map's corner."""
    normed = block.norm1(tokens)
    batch, height, width, channels = tokens.shape
    heads = block.attn.num_heads
    query, key, value = block.attn.qkv(normed).view(batch, height, width, 3, heads, -1).unbind(3)
    rows, columns = block.attn.window_size
    shift = block.shift
    table = block.attn.relative_position_bias_table.view(2 * rows - 1, 2 * columns - 1, heads)
    output = torch.zeros_like(tokens)

    def window_of(row: int, column: int) -> tuple[int, int]:
        return (row - shift[0]) // rows, (column - shift[1]) // columns

    cells = [(row, column) for row in range(height) for column in range(width)]
    for row, column in cells:
        seen = [cell for cell in cells if window_of(*cell) == window_of(row, column)]
        for head in range(heads):
            scores = torch.stack(
                [
                    (query[:, row, column, head] * key[:, r, c, head]).sum(-1) * (channels // heads) ** -0.5
                    + table[row - r + rows - 1, column - c + columns - 1, head]
                    for r, c in seen
                ],
                1,
            ).softmax(1)
            values = torch.stack([value[:, r, c, head] for r, c in seen], 1)
            size = channels // heads
            output[:, row, column, head * size : (head + 1) * size] = (scores[..., None] * values).sum(1)
    return block.attn.proj(output)


@given(size=st.tuples(st.integers(1, 7), st.integers(1, 7)), window=st.integers(2, 4), shifted=st.booleans())
def test_masked_padding_equals_no_padding(size: tuple[int, int], window: int, shifted: bool) -> None:
    torch.manual_seed(0)
    shift = (window // 2,) * 2 if shifted else (0, 0)
    block = Block(8, 2, (window, window), shift, 2.0, 0.0, True, 1e-6).double()
    torch.nn.init.normal_(block.attn.relative_position_bias_table)
    torch.nn.init.normal_(block.attn.qkv.bias)
    tokens = torch.randn(2, *size, 8, dtype=torch.double, requires_grad=True)
    plan = block.plan(tokens)
    fast = block.attn(block.norm1(tokens), plan)
    slow = attention_by_loops(block, tokens)
    torch.testing.assert_close(fast, slow)
    aim = torch.randn_like(fast)
    (fast_gradient,) = torch.autograd.grad((fast * aim).sum(), tokens, retain_graph=True)
    (slow_gradient,) = torch.autograd.grad((slow * aim).sum(), tokens)
    torch.testing.assert_close(fast_gradient, slow_gradient)


@pytest.mark.parametrize("mask_padding", [True, False])
@pytest.mark.parametrize("size", [(7, 7), (8, 13), (3, 20), (6, 5), (14, 14)])
def test_window_reverse_inverts_window_partition(size: tuple[int, int], mask_padding: bool) -> None:
    tokens = torch.randn(2, *size, 3)
    for shift in ((0, 0), (3, 3), (0, 3)):
        plan = plan_windows(size, (7, 7), shift, mask_padding)
        windows = window_partition(tokens, plan)
        assert windows.shape[0] == 2 * plan.count
        torch.testing.assert_close(window_reverse(windows, plan), tokens)


def test_cached_masks_work_in_training_after_inference() -> None:
    model = SwinTransformer(num_classes=2, img_size=64, **TINY)
    with torch.inference_mode():
        model(torch.randn(1, 3, 72, 64))
    model(torch.randn(1, 3, 72, 64)).sum().backward()
    tokens = torch.zeros(1)
    plan = plan_windows((10, 10), (7, 7), (3, 3), True)
    assert mask(plan, tokens) is mask(plan, tokens)


def test_windows_and_shifts_as_released() -> None:
    found = {}
    for window in (7, 14):
        model = SwinTransformer(num_classes=0, window_size=window, **TINY)
        found[window] = [
            [(block.attn.window_size[0], block.shift[0]) for block in stage.blocks] for stage in model.layers
        ]
    assert found[7] == [[(7, 0), (7, 3)]] * 3 + [[(7, 0), (7, 0)]]
    assert found[14] == [[(14, 0), (14, 7)]] * 2 + [[(14, 0), (14, 0)], [(7, 0), (7, 0)]]


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_attention_rows_sum_to_one_in_half_precision() -> None:
    model = SwinTransformer(num_classes=0, img_size=64, **TINY).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        weights = model.last_attention(torch.randn(2, 3, 64, 64))
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


def test_unknown_padding_raises_user_error() -> None:
    with pytest.raises(UserError, match="padding='reflect'"):
        SwinTransformer(padding="reflect")  # type: ignore[arg-type]
