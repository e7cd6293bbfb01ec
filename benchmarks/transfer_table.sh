#!/usr/bin/env bash
# Compare pre-trained with random weights for detection and segmentation on small data (Swin-T).
#
#   benchmarks/transfer_table.sh COCO CAMVID ESVIT SUPERVISED [OUT]
#
# COCO        a folder in COCO format, here a subset of COCO 2017 with 532 / 133 images, long side 320
# CAMVID      CamVid, 367 / 101 / 233 images, 320 × 240
# ESVIT       a run of 'frugalvit pretrain', a folder or a checkpoint (Swin-T, window 7)
# SUPERVISED  a run of 'frugalvit train', a folder or a checkpoint (Swin-T, window 7)
#
# Three comparisons: Mask R-CNN, Cascade Mask R-CNN, UperNet. Each writes comparison.md, .csv, .tex and .png into its
# folder, and every run writes a report. Start an interrupted comparison again to resume it. Set STEPS, SEEDS, DEVICE,
# LR_DETECT and LR_SEGMENT in the environment; the default learning rates are the papers'. One seed has no paired test.
set -euo pipefail

coco=$1 camvid=$2 esvit=$3 supervised=$4 out=${5:-runs/transfer}
steps=${STEPS:-1000} seeds=${SEEDS:-1} device=${DEVICE:-auto}
settings=("esvit: init=$esvit" "supervised: init=$supervised" "random: init=none")
common=(--backbone swin_tiny_w7 --steps "$steps" --seeds "$seeds" --device "$device" --batch 16)
common+=(--evaluate-every $(((steps + 2) / 3)))

for head in mask-rcnn cascade; do
    frugalvit detect compare "$coco" --head "$head" --img-size 384 --lr "${LR_DETECT:-1e-4}" "${common[@]}" \
        --settings "${settings[@]}" --out "$out/$head"
done
frugalvit segment compare "$camvid" --img-size 256 --lr "${LR_SEGMENT:-6e-5}" --test.multi-scale "${common[@]}" \
    --settings "${settings[@]}" --out "$out/upernet"
