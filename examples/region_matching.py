"""EsViT in a plain PyTorch loop, without labels: a student matches views and regions of its EMA teacher.

    python examples/region_matching.py

``frugalvit pretrain`` adds crops on the device, schedules, health metrics and exact resume.
"""

import copy
from itertools import chain

import torch

import frugalvit as fv
from frugalvit.objectives import update_average


def main(steps: int = 10, backbone: str = "swin_nano", img_size: int = 64) -> list[float]:
    torch.manual_seed(0)
    student = fv.create_backbone(backbone, img_size=img_size)
    teacher = copy.deepcopy(student).requires_grad_(False)
    heads = {"prototypes": 64, "hidden": 64, "bottleneck": 16}  # few, for few images
    views = fv.ViewMatching(student.pooled_dim, **heads)  # <- 1: views agree (L_V)
    regions = fv.RegionMatching(student.dim, **heads)  # <- 2: the best matching regions agree (L_R)
    learned = [p for p in chain(student.parameters(), views.parameters(), regions.parameters()) if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=5e-4)

    losses: list[float] = []
    for _ in range(steps):
        image = torch.rand(4, 3, img_size, img_size)
        crops = [image, image.flip(-1) + 0.1 * torch.randn_like(image), image[..., 8:40, 8:40]]  # two global, one local
        with torch.no_grad():
            taught = [teacher(crop) for crop in crops[:2]]
        seen = [student(crop) for crop in crops]
        loss = 0.5 * views(seen, taught, 0.04) + 0.5 * regions(seen, taught, 0.04)  # <- 3: the teacher's temperature
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for averaged, source in (
            (teacher, student),
            (views.teacher, views.student),
            (regions.teacher, regions.student),
        ):
            update_average(averaged, source, momentum=0.99)
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    values = main()
    print(f"loss {values[0]:.3f} -> {values[-1]:.3f} in {len(values)} steps")
