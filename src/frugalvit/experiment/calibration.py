"""Calibrate a classifier on held-out images: temperature, sets of classes, and distance to the training images.

A model folder holds the result: config.json as ``frugalvit.meta.calibration``, and training_features.safetensors.
"""

import math
from pathlib import Path
from typing import Annotated, Any

import pydantic
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn import functional as F

from frugalvit.errors import UserError
from frugalvit.utils.files import make_folder, write_atomically

FEATURES_FILE = "training_features.safetensors"
MAX_FEATURES = 5_000  # training images; the file then has 2 MB for 192 dimensions
FEWEST = 20  # held-out images; with fewer, the largest usual distance is unknown
USUAL = 0.95  # share of the held-out images that count as like training
NEIGHBOURS = 5
_COLDEST, _HOTTEST = 0.05, 20.0  # temperatures

_Share = Annotated[float, pydantic.Field(ge=0, le=1)]


class Calibration(pydantic.BaseModel):
    """What makes the answers of a classifier reliable, measured on ``images`` held-out images with accuracy ``top1``.

    set_probability: a set for a coverage of i + 1 per cent holds each class of at least probability [i]
    distance:        1 - cosine to the fifth nearest training image; a larger one is unlike training
    """

    model_config = pydantic.ConfigDict(frozen=True, arbitrary_types_allowed=True)

    temperature: Annotated[float, pydantic.Field(ge=_COLDEST, le=_HOTTEST)]  # softmax(logits / it): probabilities
    held_out: str
    images: int
    top1: float
    ece: tuple[float, float]  # the expected calibration error before and after, in points
    set_probability: Annotated[tuple[_Share, ...], pydantic.Field(min_length=99, max_length=99)]
    distance: Annotated[float, pydantic.Field(ge=0, le=2)] | None = None
    gallery: Tensor | None = pydantic.Field(default=None, exclude=True, repr=False)  # unit features, training (N, D)

    def lowest_probability(self, coverage: float) -> float:
        """Return the lowest probability of a class in the sets for this coverage, rounded up to per cent."""
        return self.set_probability[math.ceil(100 * coverage - 1e-9) - 1]

    def distances(self, pooled: Tensor) -> list[float]:
        """Return the distances of features (B, D) to training; empty if no training features are stored."""
        return [] if self.gallery is None else neighbour_distance(pooled, self.gallery.to(pooled.device)).tolist()

    def is_unlike(self, distance: float) -> bool:
        """Whether an image at this distance is unlike the training images."""
        return self.distance is not None and distance > self.distance

    def __str__(self) -> str:
        error = f"calibration error (ECE) {self.ece[0]:.1f} points before, {self.ece[1]:.1f} after"
        return f"calibrated on {self.images:,} images ({self.held_out}): temperature {self.temperature:.2f}; {error}"


def calibrate(
    logits: Tensor, labels: Tensor, held_out: str, gallery: Tensor | None = None, pooled: Tensor | None = None
) -> Calibration | str:
    """Calibrate on held-out images, logits (N, C), labels (N,) and pooled (N, D), or return why it is impossible.

    gallery: features of training images (M, D); without ``pooled`` each is compared with the others
    """
    if len(labels) < FEWEST:
        return f"not calibrated: it needs at least {FEWEST} held-out images, not {len(labels)}"
    if not bool(logits.isfinite().all()):
        return "not calibrated: the outputs are non-finite"
    temperature = fit_temperature(logits, labels)
    before, after = ((logits.double() / t).softmax(1) for t in (1.0, temperature))
    right = after.argmax(1) == labels
    # The score of split conformal prediction is 1 - probability (LAC, Sadinle et al. 2019): of all sets with a
    # coverage, these are the smallest on average.
    scores = 1 - after.gather(1, labels[:, None])[:, 0]
    # A little lower, so that single precision in ONNX does not lose a class at the bound.
    lowest = [max(0.0, 1 - conformal_quantile(scores, percent / 100) - 1e-6) for percent in range(1, 100)]
    distance, gallery = None, gallery if gallery is not None and len(gallery) > NEIGHBOURS else None
    if gallery is not None:
        gallery = F.normalize(gallery.float(), dim=1).half().float()  # as it is stored
        usual = neighbour_distance(gallery if pooled is None else pooled, gallery, leave_one_out=pooled is None)
        distance = min(max(conformal_quantile(usual, USUAL), 0.0), 2.0)
    return Calibration(
        temperature=temperature,
        held_out=held_out,
        images=len(labels),
        top1=100 * right.double().mean().item(),
        ece=(measure_calibration(before, labels)["error"], measure_calibration(after, labels)["error"]),
        set_probability=tuple(lowest),
        distance=distance,
        gallery=gallery,
    )


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Minimize the cross-entropy of softmax(logits / T) over T (Guo et al. 2017), within 0.05 and 20.

    If every answer is right the loss has no minimum, and T is at least 1.
    """
    from scipy.optimize import minimize_scalar

    logits = logits.double()
    coldest = 1.0 if bool((logits.argmax(1) == labels).all()) else _COLDEST
    best: Any = minimize_scalar(
        lambda log_t: F.cross_entropy(logits / math.exp(log_t), labels).item(),
        bounds=(math.log(coldest), math.log(_HOTTEST)),
        method="bounded",
    )
    return math.exp(best.x)


def measure_calibration(probabilities: Tensor, labels: Tensor, bins: int = 10) -> dict[str, Any]:
    """Compare confidence with accuracy, in per cent: per bin of equal width, and their mean distance (ECE)."""
    confidence, predicted = probabilities.max(1)
    number, right = (confidence * bins).long().clamp(max=bins - 1), predicted == labels
    rows = []
    for part in (number == k for k in number.unique().tolist()):
        sure, accuracy = (100 * x[part].double().mean().item() for x in (confidence, right))
        rows.append({"images": int(part.sum()), "confidence": sure, "accuracy": accuracy})
    distance = sum(row["images"] * abs(row["confidence"] - row["accuracy"]) for row in rows)
    return {"bins": rows, "error": distance / max(1, len(number))}


def describe_calibration(logits: Tensor, labels: Tensor, calibration: Calibration | str) -> dict[str, Any]:
    """Measure the calibration on scored images: after and before the temperature, and how it was found."""
    temperature = calibration.temperature if isinstance(calibration, Calibration) else 1.0
    after, before = (measure_calibration((logits / t).softmax(1), labels) for t in (temperature, 1.0))
    return {**after, "before": before, "how": str(calibration)}


def conformal_quantile(scores: Tensor, share: float) -> float:
    """Return the ceil((n + 1) share)-th smallest score, which a new one exceeds with probability 1 - share, or inf."""
    rank = math.ceil((len(scores) + 1) * share - 1e-9)
    return math.inf if rank > len(scores) else scores.sort().values[rank - 1].item()


def neighbour_distance(pooled: Tensor, gallery: Tensor, *, leave_one_out: bool = False) -> Tensor:
    """Return 1 - cosine to the fifth nearest row of the gallery, but not to itself: (B, D), unit (N, D) -> (B,)."""
    similarity = F.normalize(pooled.float(), dim=1) @ gallery.T
    if leave_one_out:
        similarity.fill_diagonal_(-torch.inf)
    return 1 - similarity.topk(NEIGHBOURS, dim=1).values[:, -1]


def spread_rows(count: int) -> Tensor:
    """Return the evenly spaced rows that are stored of ``count`` training images."""
    return torch.linspace(0, count - 1, min(count, MAX_FEATURES)).round().long()


def save_calibration(calibration: Calibration | str | None, folder: Path) -> dict[str, Any]:
    """Write the training features beside the weights; return the facts for config.json."""
    if not isinstance(calibration, Calibration):
        return {}
    if calibration.gallery is not None:
        content = save({"features": calibration.gallery.half().cpu().contiguous()})
        write_atomically(make_folder(folder) / FEATURES_FILE, lambda handle: handle.write(content))
    return {"calibration": calibration.model_dump()}


def read_calibration(folder: Path, stored: Any, dim: int) -> Calibration | None:
    """Read the calibration of a model folder from its config.json (``stored``) and its features of ``dim``."""
    if stored is None:
        return None
    try:
        calibration = Calibration.model_validate(stored)
    except pydantic.ValidationError as error:
        field = ".".join(map(str, error.errors()[0]["loc"]))
        raise UserError(f"{folder / 'config.json'}: calibration.{field} is damaged. Remove 'calibration'.") from None
    path = folder / FEATURES_FILE
    if calibration.distance is None or not path.is_file():
        return calibration
    try:
        gallery = load_file(path)["features"].float()
    except (SafetensorError, KeyError, OSError):
        gallery = torch.empty(0)
    if gallery.ndim != 2 or gallery.shape[1] != dim or len(gallery) <= NEIGHBOURS:
        raise UserError(f"{path} is damaged: it has no features of {dim} dimensions. Remove it.")
    return calibration.model_copy(update={"gallery": gallery})
