"""Options of learning from labelled and unlabelled images together."""

from typing import Literal

from frugalvit.config.base import Config, option
from frugalvit.config.types import Auto, Count, Range, Rate, Several, Share, Whole

REST = "rest"  # the value of --unlabelled that stands for the images of DATA without a label


class SemiConfig(Config):
    """Unlabelled images (--unlabelled): pseudo-labels from weak views and the EMA weights, learned on strong views."""

    method: Literal["fixmatch", "flexmatch", "softmatch"] = option(
        "softmatch", "fixmatch: one threshold; flexmatch: one per class that adapts; softmatch: weights"
    )
    ratio: Count | Auto = option("auto", "unlabelled images per labelled one; auto: the papers' 7, or fewer")
    weight: float = option(1.0, "weight of the pseudo-label loss", ge=0)
    start: Share = option(0.4, "share of the run that learns from labels alone: the first pseudo-labels are wrong")
    warmup: Share = option(0.1, "share of the run in which that weight then rises from 0")
    threshold: float = option(
        0.95, "FixMatch's threshold, FlexMatch's highest one", gt=0, lt=1, needs="method=fixmatch or method=flexmatch"
    )
    mixing: bool = option(True, "mix strong views with each other, as often as labelled images (--mixing.prob)")
    momentum: Rate | Auto = option(
        "auto", "EMA rate of SoftMatch's weights; auto: 0.999, less in short runs", needs="method=softmatch"
    )
    temperature: float = option(0.0, "0: learn the pseudo-label's class; above 0: a distribution this sharp", ge=0)
    weak_scale: Range = option((0.5, 1.0), "area of a weak view, if crops are resized; strong views use augment.scale")
    operations: Whole = option(3, "RandAugment operations of a strong view, of any magnitude up to 10")
    erasing: Share = option(1.0, "probability of erasing a rectangle, up to a quarter of a strong view")
    region_weight: float = option(0.0, "weight of EsViT's region matching of weak and strong views; 0: off", ge=0)
    prototypes: Several | Auto = option(
        "auto", "size of the region head's output; auto: from the number of images", needs="region_weight"
    )
