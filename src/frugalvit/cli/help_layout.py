"""What ``COMMAND --help`` shows of a command with many options; ``--help all`` shows the rest."""

_RUN = ("backbone", "img_size", "epochs", "batch", "lr", "seed", "out", "init", "resume", "device", "devices", "track")
_TRAIN = (
    *(*_RUN, "pretrained", "labels", "unlabelled", "balance", "split", "val_fraction"),
    *("localization.weight", "guide.model"),
)
_DENSE = (*_RUN, "steps", "pretrained", "evaluate_every")

SHOWN_OPTIONS: dict[str, tuple[str, ...]] = {
    "train": (*_TRAIN, "recipe", "target"),
    "pretrain": (
        *(*_RUN, "method", "recipe", "images", "label_source", "continue_from", "split"),
        *("matching.region_weight", "matching.prototypes"),
    ),
    "distil": (*_RUN, "images", "label_source", "split", "teacher_size", "cache_teacher"),
    "compare": (*_TRAIN, "with_settings", "without_settings", "settings", "seeds"),
    "pretrain compare": (
        *(*_RUN, "steps", "minutes", "backbones", "images", "matching.region_weight", "matching.prototypes"),
        *("with_settings", "without_settings", "settings", "seeds", "metric"),
    ),
    "detect train": (*_DENSE, "head", "masks", "categories"),
    "segment train": (*_DENSE, "ignore_index", "label_count"),
    "detect compare": (*_DENSE, "head", "with_settings", "without_settings", "settings", "seeds", "metric"),
    "segment compare": (*_DENSE, "with_settings", "without_settings", "settings", "seeds", "metric"),
}
"""The options that most people need, by command. Other commands show all of theirs."""

EXAMPLES: dict[str, tuple[str, ...]] = {
    "train": (
        "frugalvit train photos/                          one folder per class; everything else is chosen",
        "frugalvit train photos/ --init runs/PRETRAINED   few labels, after 'frugalvit pretrain'",
    ),
    "pretrain": (
        "frugalvit pretrain images/                       no labels needed",
        "frugalvit pretrain images/ --method instances    up to 10,000 images: each is a class of its own",
    ),
    "distil": ("frugalvit distil vit_small_patch14_dinov2.lvd142m images/ --backbone swin_tiny_w7",),
    "compare": (
        "frugalvit compare photos/ --seeds 5              with and without Drloc",
        "frugalvit compare photos/ --with lr=0.001 --without lr=0.0005",
    ),
    "pretrain compare": (
        "frugalvit pretrain compare images/ --minutes 10   L_V + L_R against L_V, three seeds, equal time",
        "frugalvit pretrain compare images/ --backbones deit_small swin_tiny_w7 --minutes 10",
    ),
    "detect train": (
        "frugalvit detect train coco/                     images and COCO-format JSON files",
        "frugalvit detect train coco/ --init runs/PRETRAINED --epochs 12",
    ),
    "segment train": (
        "frugalvit segment train scenes/                  folders 'images' and 'masks'",
        "frugalvit segment train scenes/ --init runs/PRETRAINED --epochs 40",
    ),
}
