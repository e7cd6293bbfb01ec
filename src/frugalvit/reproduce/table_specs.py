"""What each table of docs/RESULTS.md compares: data, common values, settings. ``running.py`` runs them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["train", "pretrain", "detect", "segment"]


@dataclass(frozen=True)
class Recipe:
    """One table: the data it needs, the values all its runs share, and its settings (the last is the baseline).

    settings: each setting's options as ``compare`` reads them; ``{esvit}`` stands for the run that ``starts`` names.
    starts: runs that settings begin from, as (table, setting), which may begin from others; made where they are absent.
    """

    about: str
    data: str
    common: dict[str, Any]
    settings: dict[str, str]
    kind: Kind = "train"
    backbones: tuple[str, ...] = ("swin_tiny_w7",)
    starts: dict[str, tuple[str, str]] = field(default_factory=dict)
    metric: str = "top1"


_PAPER, _OFF = "localization.variant=l1", "localization.weight=0"
_ON = f"localization.weight=0.5 {_PAPER}"
_CLASSIFIED = "localization.weight=0.5 localization.variant=ce"
_AS_PAPER = f"{_ON} batch=1024 lr=0.001 optimizer.warmup=20 ema=0 mixing.prob=1 augment.operations=2"
_PAIR = {"with": _ON, "without": _OFF}
_VARIED = {"mixing": {"prob": 1.0}, "augment": {"operations": 2}}  # as in the papers; "auto" does less, since measured
_LOOKED = _VARIED | {"split": "train+val", "img_size": 224, "evaluate_every": 500}
_FLOWERS = _LOOKED | {"epochs": 100, "batch": 128}
_FEW = _LOOKED | {"labels": 0.1, "steps": 1000, "batch": 32}
_WIDE = "backbone_args.window_size=8"  # swin_mini's windows at 32 px when these settings were measured; now 4
_PAPER_VIEWS = (  # the momentum is what "auto" took then
    "crops.blur_sigma=0.1,2 crops.local_scale=0.05,0.4 crops.global_scale=0.4,1 matching.teacher_temp=0.07"
    " matching.momentum=0.9884"
)
_SMALL_VIEWS = (
    "crops.blur_sigma=0.1,0.3 crops.local_scale=0.2,0.5 crops.global_scale=0.5,1 matching.teacher_temp=0.04 batch=512"
)
_SLOW = f"{_SMALL_VIEWS} matching.momentum=0.996"
_OF_ALL = f"{_SLOW} images=train+val matching.prototypes=2048 epochs=270"
_CIFAR = _VARIED | {"split": "given", "batch": 256, "evaluate_every": 5000}
_PUBLISHED = "epochs=300 batch=256 lr=0.001 optimizer.warmup=30 mixing.prob=0.5 mixing.mixup=1"  # for the Swin of 80.9
_VARIETY = "drop_path=0.2 augment.crop=resized augment.scale=0.5,1"
_SPARING = "optimizer.layer_decay=0.85"  # what has learned without labels changes less than what has not
_UNLABELLED = {"images": "all", "epochs": 40, "batch": 128, "img_size": 112}
_VIEWS_ONLY = "matching.view_weight=1 matching.region_weight=0"
_ESVIT = {"esvit": ("esvit-flowers", "L_V + L_R")}
_ANY_START = _ESVIT | {"supervised": ("drloc-flowers", "without")}
_STARTS = {"EsViT": "init={esvit}", "supervised": "init={supervised}", "random": "init=none"}
_DETECT = {"steps": 1200, "batch": 16, "img_size": 320, "lr": 2e-4, "evaluate_every": 600, "categories": "one"}

_DRLOC = {
    "drloc-flowers": Recipe(
        "Drloc from scratch on Flowers-102 (paper, Table 4): with and without, for each backbone",
        "flowers102",
        _FLOWERS,
        {"with": _PAPER, "without": _OFF},
        backbones=("swin_tiny_w7", "t2t_vit_14", "cvt_13", "vit_base", "resnet50"),
    ),
    "drloc-cifar": Recipe(
        "Drloc from scratch on CIFAR-100 at 224 px (paper, Table 4)",
        "cifar100",
        _CIFAR | {"epochs": 100, "img_size": 224},
        {
            "20 epochs, with, ce": f"{_CLASSIFIED} epochs=20",
            "20 epochs, without": f"{_OFF} epochs=20",
            "with, ce, not mixed": f"{_CLASSIFIED} mixing.prob=0",
            "without, not mixed": f"{_OFF} mixing.prob=0",
            "with, ce": _CLASSIFIED,
            "with": _PAPER,
            "without": _OFF,
        },
        backbones=("swin_tiny_w7", "vit_tiny_patch16_224", "resnet50"),
    ),
    "drloc-quickdraw": Recipe(
        "Drloc from scratch on Quick, Draw! (drawings, 70 of each class)",
        "quickdraw",
        _VARIED | {"split": "given", "epochs": 100, "batch": 256, "img_size": 112, "evaluate_every": 5000},
        {"with, ce": _CLASSIFIED, **_PAIR},
    ),
    "drloc-forms": Recipe(
        "the paper's normalised targets and constant λ against the released raw targets and ramp; grid before the norm",
        "flowers102",
        _FLOWERS,
        {
            "paper": _ON,
            "released": f"{_ON} localization.form=released localization.schedule=ramp localization.grid=raw",
            "paper, raw grid": f"{_ON} localization.grid=raw",
            "clean images": f"{_ON} localization.images=clean",
            "fast head": f"{_ON} localization.lr_scale=10",
            "without": _OFF,
        },
    ),
    "drloc-learned": Recipe(
        "few labels: what makes the localisation task itself be learned, and whether that helps",
        "flowers102",
        _FEW,
        {
            "paper": _ON,
            "all pairs": f"{_ON} localization.pairs=all",
            "fast head": f"{_ON} localization.lr_scale=10",
            "clean images": f"{_ON} localization.images=clean",
            "λ=4": f"localization.weight=4 {_PAPER}",
            "ce": _CLASSIFIED,
            "all three": f"{_ON} localization.pairs=all localization.lr_scale=10 localization.images=clean",
            "all three, λ=2": f"localization.weight=2 {_PAPER} localization.pairs=all localization.lr_scale=10"
            " localization.images=clean",
            "without": _OFF,
        },
    ),
    "drloc-variants": Recipe(
        "loss variants (paper, Table 6)",
        "flowers102",
        _FLOWERS,
        {
            name: f"localization.weight=0.5 localization.variant={name}"
            for name in ("l1", "signed", "ce", "reg", "dense")
        }
        | {
            "dense, pooled": "localization.weight=0.5 localization.variant=dense localization.grid_size=7",
            "ce, λ=0.2": "localization.weight=0.2 localization.variant=ce",
            "ce, λ=2": "localization.weight=2 localization.variant=ce",
            "without": _OFF,
        },
    ),
    "drloc-pairs": Recipe(
        "pairs per image (paper, Table 2a)",
        "flowers102",
        _FLOWERS,
        {f"m={pairs}": f"{_ON} localization.pairs={pairs}" for pairs in (32, 64, 128, "all")} | {"without": _OFF},
    ),
    "drloc-weights": Recipe(
        "the weight λ (paper, Table 2b)",
        "flowers102",
        _FLOWERS,
        {f"λ={weight}": f"localization.weight={weight} {_PAPER}" for weight in (0.1, 0.5, 1.0, 4.0, 16.0)}
        | {"λ=0": _OFF},
    ),
    "drloc-width": Recipe(
        "width of the head (paper, Table 16)",
        "flowers102",
        _FLOWERS,
        {f"width={width}": f"{_ON} localization.hidden={width}" for width in (256, 512, 1024)} | {"without": _OFF},
    ),
    "drloc-batch": Recipe(
        "the same epochs at other batch sizes: steps matter more than the loss",
        "flowers102",
        _FLOWERS,
        {
            f"batch={batch} {name}": f"{weight} batch={batch}"
            for batch in (1024, 256, 128)
            for name, weight in _PAIR.items()
        },
    ),
}

_DEFAULTS = {
    "defaults-flowers": Recipe(
        "500 images, a small network: what 'auto' chooses, with and without Drloc, against the paper's values",
        "flowers102",
        _VARIED | {"split": "train+val", "labels": 0.25, "epochs": 100, "img_size": 64, "evaluate_every": 10**6},
        {
            "auto, with Drloc": _ON,
            "auto, with Drloc, ce": _CLASSIFIED,
            "auto, with Drloc, λ=4": f"localization.weight=4 {_PAPER}",
            "auto, not mixed, no RandAugment, with Drloc": f"{_ON} mixing.prob=0 augment.operations=0",
            "auto, not mixed, no RandAugment": f"{_OFF} mixing.prob=0 augment.operations=0",
            "EsViT, not mixed, no RandAugment": f"init={{esvit}} {_OFF} mixing.prob=0 augment.operations=0",
            "auto, not mixed": f"{_OFF} mixing.prob=0",
            "320 epochs, not mixed, no RandAugment": f"{_OFF} epochs=320 mixing.prob=0 augment.operations=0",
            "320 epochs, half mixed": f"{_OFF} epochs=320 mixing.prob=0.5",
            "auto, half mixed": f"{_OFF} mixing.prob=0.5",
            "auto": _OFF,
            "lr=0.00013": f"{_OFF} lr=0.00013",
            "paper": f"{_OFF} batch=1024 lr=0.001 ema=0",
        },
        backbones=("swin_nano",),
        starts={"esvit": ("esvit-nano", "lr=0.0005")},
    ),
    "defaults-swin": Recipe(
        "2,000 images, the papers' Swin: what 'auto' chooses against the paper's values for large data",
        "flowers102",
        {"split": "train+val", "epochs": 100, "img_size": 224, "evaluate_every": 10**6},
        {"auto, no RandAugment": "augment.operations=0", "auto": "augment.operations=2", "paper": _AS_PAPER},
    ),
    "defaults-cifar": Recipe(
        "50,000 images at 32 px, a Swin of 7 M parameters: what 'auto' chooses against the paper's values",
        "cifar100",
        {"split": "given", "epochs": 100, "img_size": 32, "evaluate_every": 10**6},
        {"auto": "", "paper": _AS_PAPER},
        backbones=("swin_mini",),
    ),
    "mixing-flowers": Recipe(
        "all labels, the papers' Swin: every step mixed (mixup and cutmix) as in the papers, every other, or none",
        "flowers102",
        _FLOWERS,
        {
            "not mixed, no RandAugment, with Drloc": f"{_CLASSIFIED} mixing.prob=0 augment.operations=0",
            "not mixed, no RandAugment": f"{_OFF} mixing.prob=0 augment.operations=0",
            "not mixed, with Drloc": f"{_CLASSIFIED} mixing.prob=0",
            "half mixed, with Drloc": f"{_CLASSIFIED} mixing.prob=0.5",
            "half mixed": f"{_OFF} mixing.prob=0.5",
            "not mixed, with Drloc, Eq. 2": f"{_ON} mixing.prob=0",
            "not mixed": f"{_OFF} mixing.prob=0",
        },
    ),
    "lr-flowers": Recipe(
        "all labels, the papers' Swin: learning rates above the one that follows from the paper's",
        "flowers102",
        _FLOWERS,
        {"lr=0.0007": f"{_ON} lr=0.0007", "lr=0.0014": f"{_ON} lr=0.0014", "auto": _ON},
    ),
}

_PRETRAINING = {
    "esvit-flowers": Recipe(
        "label-free pre-training on all Flowers-102 images: L_V, L_V + L_R, and Drloc as a third objective; probes",
        "flowers102",
        _UNLABELLED,
        {"L_V": _VIEWS_ONLY, "L_V + L_R": "", "L_V + L_R + Drloc": _ON},
        kind="pretrain",
    ),
    "esvit-long": Recipe(
        "the same two and a half times as long, for the best that Flowers-102 gives",
        "flowers102",
        _UNLABELLED | {"epochs": 100},
        {"L_V + L_R": ""},
        kind="pretrain",
    ),
    "esvit-nano": Recipe(
        "the same with a small network at 64 px, for machines without a GPU",
        "flowers102",
        {"images": "all", "epochs": 20, "img_size": 64, "batch": 32},
        {"lr=0.0005": "lr=0.0005", "L_V + L_R": ""},
        kind="pretrain",
        backbones=("swin_nano",),
    ),
    "esvit-cifar": Recipe(
        "the same on CIFAR-100's training images at 32 px, a Swin of 7 M parameters",
        "cifar100",
        {"images": "train", "epochs": 100, "batch": 1024, "img_size": 32, "compile": "graphs", "log_every": 50},
        {
            "L_V": f"{_VIEWS_ONLY} {_WIDE} {_PAPER_VIEWS}",
            "L_V + L_R": f"{_WIDE} {_PAPER_VIEWS}",
            "L_V + L_R + Drloc": f"{_ON} {_WIDE} {_PAPER_VIEWS}",
            "for small images": f"{_SMALL_VIEWS} {_WIDE} matching.momentum=0.9943",
            "for small images, quick teacher": f"{_SMALL_VIEWS} matching.momentum=0.9904 epochs=60",
            "for small images, slow teacher": _SLOW,
            # The model alone, without its run's checkpoint: projection heads begin anew, as measured.
            "for small images, slow teacher, 300 epochs more": f"init={{shorter}}/model {_SLOW} epochs=300",
            "for small images, slow teacher, 270 epochs more of all": f"init={{shorter}} {_OF_ALL}",
            "for small images, slow teacher, 270 epochs more of all, twice": f"init={{once}}/model {_OF_ALL}",
            "for small images, slow teacher, 300 epochs in one go": f"{_SLOW} images=train+val epochs=300",
            "30 epochs, L_V": f"{_VIEWS_ONLY} {_SLOW} epochs=30",
            "30 epochs, L_V + L_R": f"{_SLOW} epochs=30",
            "30 epochs, L_V + L_R + Drloc": f"{_ON} {_SLOW} epochs=30",
        },
        kind="pretrain",
        backbones=("swin_mini",),
        starts={
            "shorter": ("esvit-cifar", "for small images, slow teacher"),
            "once": ("esvit-cifar", "for small images, slow teacher, 270 epochs more of all"),
        },
    ),
    "esvit-backbones": Recipe(
        "L_V against L_V + L_R with other multi-stage transformers (paper, Table 8)",
        "flowers102",
        _UNLABELLED,
        {"L_V": _VIEWS_ONLY, "L_V + L_R": ""},
        kind="pretrain",
        backbones=("cvt_tiny_w7", "vil_tiny_w7"),
    ),
    "esvit-defaults": Recipe(
        "what 'auto' chooses for small data against the paper's values for ImageNet",
        "flowers102",
        _UNLABELLED,
        {"auto": "", "paper": "matching.prototypes=65536 matching.momentum=0.996 matching.teacher_temp=0.07"},
        kind="pretrain",
    ),
}

_USES = {
    "few-labels": Recipe(
        "a tenth of Flowers-102's labels: from scratch, + Drloc, + EsViT, + both",
        "flowers102",
        _FEW,
        {
            "EsViT + Drloc": f"init={{esvit}} {_ON}",
            "EsViT": f"init={{esvit}} {_OFF}",
            "Drloc": _ON,
            "EsViT, not mixed": f"init={{esvit}} {_OFF} mixing.prob=0",
            "not mixed, with Drloc, ce": f"{_CLASSIFIED} mixing.prob=0",
            "not mixed": f"{_OFF} mixing.prob=0",
            "from scratch": _OFF,
        },
        starts=_ESVIT,
    ),
    "finetune-flowers": Recipe(
        "all labels after label-free pre-training on the same images, with and without Drloc (the question of Table 5)",
        "flowers102",
        _FLOWERS,
        {
            "EsViT + Drloc, ce": f"init={{esvit}} {_CLASSIFIED}",
            "EsViT + Drloc": f"init={{esvit}} {_ON}",
            "EsViT, not mixed": f"init={{esvit}} {_OFF} mixing.prob=0",
            "EsViT, gently": f"init={{esvit}} {_OFF} lr=0.00018 optimizer.warmup=10",  # the recipe finetune
            "EsViT": f"init={{esvit}} {_OFF}",
        },
        starts=_ESVIT,
    ),
    "best-flowers": Recipe(
        "the best Flowers-102 gives from scratch: label-free pre-training on its images, then a long supervised run",
        "flowers102",
        _FLOWERS | {"epochs": 320, "evaluate_every": 1000},
        {
            "long EsViT + Drloc": f"init={{long}} {_ON}",
            "EsViT + Drloc": f"init={{esvit}} {_ON}",
            "Drloc, ce, not mixed": f"{_CLASSIFIED} mixing.prob=0",
            "Drloc, ce": _CLASSIFIED,
            "from scratch": _OFF,
        },
        starts=_ESVIT | {"long": ("esvit-long", "L_V + L_R")},
    ),
    "best-cifar": Recipe(
        "the best CIFAR-100 gives at 32 px with a Swin of 7 M parameters: label-free pre-training, then a long run",
        "cifar100",
        _CIFAR | {"epochs": 200, "batch": 512, "img_size": 32, "compile": "graphs", "log_every": 50},
        {
            "EsViT in one go + Drloc, drop path 0.2": f"init={{steady}} {_ON} drop_path=0.2 epochs=299",
            "EsViT in one go + Drloc, drop path 0.3": f"init={{steady}} {_ON} drop_path=0.3 epochs=299",
            "longest EsViT + Drloc, drop path": f"init={{longest}} {_ON} drop_path=0.2 epochs=360",
            "longer EsViT + Drloc, more variety": f"init={{longer}} {_ON} {_VARIETY} epochs=360",
            "longer EsViT + Drloc, layer decay": f"init={{longer}} {_ON} {_SPARING} epochs=360",
            "longer EsViT + Drloc, drop path": f"init={{longer}} {_ON} drop_path=0.2 epochs=360",
            "longer EsViT + Drloc": f"init={{longer}} {_ON} epochs=360",
            "EsViT + Drloc, as published": f"init={{esvit}} {_ON} {_PUBLISHED}",
            "EsViT + Drloc, repeated views": f"init={{esvit}} {_ON} epochs=100 batch=256 lr=0.001 optimizer.warmup=10"
            " mixing.prob=0.5 augment.repeats=3",
            "EsViT + Drloc, more variety": f"init={{esvit}} {_ON} {_VARIETY}",
            "EsViT + Drloc, lr=0.002": f"init={{esvit}} {_ON} lr=0.002",
            "EsViT + Drloc": f"init={{esvit}} {_ON}",
            "EsViT, half mixed": f"init={{esvit}} {_OFF} mixing.prob=0.5",
            "EsViT": f"init={{esvit}} {_OFF}",
            "Drloc, ce": f"{_CLASSIFIED} {_WIDE}",
            "Drloc, windows of 4": _ON,
            "Drloc, lr=0.002": f"{_ON} {_WIDE} lr=0.002",
            "Drloc, half mixed": f"{_ON} {_WIDE} mixing.prob=0.5",
            "Drloc": f"{_ON} {_WIDE}",
            "EsViT, 60 epochs": f"init={{esvit}} {_OFF} epochs=60",
            "60 epochs, windows of 4, not mixed": f"{_OFF} epochs=60 mixing.prob=0",
            "60 epochs, windows of 4, half mixed": f"{_OFF} epochs=60 mixing.prob=0.5",
            "60 epochs, windows of 4": f"{_OFF} epochs=60",
            "60 epochs, batch 128": f"{_OFF} {_WIDE} epochs=60 batch=128 lr=0.001",
            "60 epochs, half mixed": f"{_OFF} {_WIDE} epochs=60 mixing.prob=0.5",
            "60 epochs": f"{_OFF} {_WIDE} epochs=60",
            "from scratch": f"{_OFF} {_WIDE}",
        },
        backbones=("swin_mini",),
        starts={
            "esvit": ("esvit-cifar", "for small images, slow teacher"),
            "longer": ("esvit-cifar", "for small images, slow teacher, 300 epochs more"),
            "longest": ("esvit-cifar", "for small images, slow teacher, 270 epochs more of all, twice"),
            "steady": ("esvit-cifar", "for small images, slow teacher, 300 epochs in one go"),
        },
    ),
    "detect-mask-rcnn": Recipe(
        "Mask R-CNN on a small COCO subset, every object one category, from three starts",
        "coco_mini",
        _DETECT | {"head": "mask-rcnn"},
        _STARTS,
        kind="detect",
        starts=_ANY_START,
        metric="box_ap",
    ),
    "detect-cascade": Recipe(
        "Cascade Mask R-CNN on a small COCO subset, every object one category, from three starts",
        "coco_mini",
        _DETECT | {"head": "cascade"},
        _STARTS,
        kind="detect",
        starts=_ANY_START,
        metric="box_ap",
    ),
    "segment-upernet": Recipe(
        "UperNet on CamVid from three starts",
        "camvid",
        {"steps": 500, "batch": 16, "img_size": 256, "lr": 2e-4, "evaluate_every": 500},
        _STARTS,
        kind="segment",
        starts=_ANY_START,
        metric="miou",
    ),
}

TABLES = _DRLOC | _DEFAULTS | _PRETRAINING | _USES
