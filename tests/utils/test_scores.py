"""Every score is shown with its unit, images, interval and chance level."""

import pytest

from frugalvit.utils.scores import as_percent, read_scores, score_table

TRAIN = {
    "top1": 72.5,
    "top5": 100.0,
    "mean_per_class": 70.0,
    "scored_on": "test",
    "scored_images": 40,
    "chance": {"top1": 20.0, "top5": 100.0, "mean_per_class": 20.0},
    "best_step": 3,
}


def test_line_says_all() -> None:
    line = str(read_scores(TRAIN)[0])
    assert line == "top-1 72.5 % (95 %: 57.2 to 83.9) on 40 images of test; chance 20.0 %"


def test_val_that_chose_the_weights_says_so() -> None:
    assert "which also chose the weights" in str(read_scores(TRAIN | {"scored_on": "val", "chosen_on": "val"})[0])
    assert "of val, not used to train or to choose the weights" in str(
        read_scores(TRAIN | {"scored_on": "val", "chosen_on": None})[0]
    )
    assert "chose" not in str(read_scores(TRAIN | {"scored_on": "val", "best_step": None})[0])


def test_no_top5_for_five_classes_and_no_value_twice() -> None:
    assert [score.name for score in read_scores(TRAIN)] == ["top-1", "mean per class"]
    assert [score.name for score in read_scores(TRAIN | {"mean_per_class": 72.5})] == ["top-1"]
    sizes = {"box_ap": 0.4, "box_ap_small": 0.4, "box_ap_large": 0.3, "scored_images": 9}
    assert [score.name for score in read_scores(sizes)] == ["box AP", "box AP, large"]
    six = TRAIN | {"chance": {"top5": 100 * 5 / 6}}
    assert [score.name for score in read_scores(six)] == ["top-1", "top-5", "mean per class"]


@pytest.mark.parametrize("key", ["box_ap", "mask_ap50", "miou", "pixel_accuracy", "val_miou", "val_box_ap"])
def test_shares_become_per_cent(key: str) -> None:
    assert as_percent(key, 0.25) == 25.0


@pytest.mark.parametrize("key", ["top1", "val_top1", "seconds", "mean_per_class"])
def test_other_numbers_stay(key: str) -> None:
    assert as_percent(key, 25.0) == 25.0


def test_interval_of_a_share_is_in_per_cent() -> None:
    summary = {
        "miou": 0.43,
        "miou_interval": [0.4, 0.5],
        "scored_on": "val",
        "scored_images": 7,
        "chance": {"miou": 0.4},
    }
    (score,) = read_scores(summary)
    assert str(score) == "mIoU 43.0 % (95 %: 40.0 to 50.0) on 7 images of val; chance 40.0 %"
    table = score_table([score])
    assert table.rows == [["mIoU", "43.0 %", "40.0 to 50.0 %", "40.0 %"]]
    assert table.title == "7 images of val"
