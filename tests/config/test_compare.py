"""Settings of a comparison: ``option=value`` texts."""

import pytest

from frugalvit.config.compare import parse_assignments
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import TrainConfig
from frugalvit.errors import UserError


def test_backbone_args_are_parsed_as_yaml() -> None:
    values = parse_assignments(["backbone_args.window_size=4", "backbone_args.depths=[1,1]", "backbone_args.act=gelu"])
    assert TrainConfig.parse({"data": "x"} | values).backbone_args == {
        "window_size": 4,
        "depths": [1, 1],
        "act": "gelu",
    }


def test_settings_may_have_several_values() -> None:
    values = parse_assignments(["crops.blur_sigma=0.1,0.3", "crops.jitter=0.1,0.2,0.3,0.4"])
    crops = PretrainConfig.parse({"data": "x"} | values).crops
    assert crops.blur_sigma == (0.1, 0.3) and crops.jitter == (0.1, 0.2, 0.3, 0.4)
    with pytest.raises(UserError, match="several values"):
        PretrainConfig.parse({"data": "x"} | parse_assignments(["crops.blur_sigma=0.1"]))
