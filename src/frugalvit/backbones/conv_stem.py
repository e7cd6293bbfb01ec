"""``--stem conv``: convolutions in place of the patches of any network with a patch embedding."""

from torch import nn

from frugalvit.errors import UserError


class ConvStem(nn.Sequential):
    """3×3 convolutions of stride 2 with batch norms, then a projection; the tokens are as many as the patches.

    After Xiao et al., "Early Convolutions Help Transformers See Better" (2021). A patch of 4 pixels gives two
    convolutions, one of 16 pixels four; the last one has the width of the tokens, each one before it half as much.
    """

    def __init__(self, in_chans: int, dim: int, patch: int) -> None:
        halvings = (patch & -patch).bit_length() - 1  # how often 2 divides the patch
        rest, layers, width_in = patch >> halvings, [], in_chans
        for number in reversed(range(max(1, halvings))):
            width = max(1, dim >> number)
            convolution = nn.Conv2d(width_in, width, 3, stride=2 if halvings else 1, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
            width_in = width
        super().__init__(*layers, nn.Conv2d(width_in, dim, rest, rest))
        self.in_channels = in_chans
        self.kernel_size = self.stride = (patch, patch)


def set_conv_stem(model: nn.Module) -> None:
    """Replace the patch embedding by a ``ConvStem``."""
    name = (getattr(model, "pretrained_cfg", None) or {}).get("first_conv")
    patches = dict(model.named_modules()).get(name) if isinstance(name, str) else None
    if not isinstance(name, str) or not isinstance(patches, nn.Conv2d) or patches.kernel_size != patches.stride:
        raise UserError(f"--stem conv: {type(model).__name__} does not start with patches, but with its own layers")
    model.set_submodule(name, ConvStem(patches.in_channels, patches.out_channels, patches.stride[0]))
