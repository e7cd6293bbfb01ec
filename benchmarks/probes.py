"""The logistic probe and k-NN against scikit-learn on the same features, times as ratios.

    python benchmarks/probes.py                       # CPU, a minute or two
    python benchmarks/probes.py --device cuda --images 50000 --classes 100 --width 768

Features are Gaussian classes whose axes differ a hundredfold in scale, as a network's do. Both fit the same 15
strengths (scikit-learn: one fit each from zero, ``max_iter=1000`` and its default tolerance, as in CLIP's protocol) and
find the same neighbours (``NearestNeighbors(algorithm="brute", metric="cosine")``). Prints one JSON object.
"""

import argparse
import json
import platform
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import sklearn
import torch
from sklearn.linear_model import LogisticRegression as Theirs
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from frugalvit.probing.knn import knn_accuracy
from frugalvit.probing.logistic import LogisticRegression, search_strength


def make_features(images: int, width: int, classes: int, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """Make classes that overlap, so that regularization matters."""
    generator = torch.Generator().manual_seed(0)
    scale, centres = torch.logspace(0, -2, width), torch.randn(classes, width, generator=generator)
    generator.manual_seed(seed)
    labels = torch.arange(images) % classes
    return (centres[labels] + noise * torch.randn(images, width, generator=generator)) * scale, labels


def timed(call: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Return the seconds until the device is idle, and the result."""
    _wait(device)
    began = time.perf_counter()
    result = call()
    _wait(device)
    return time.perf_counter() - began, result


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def logistic(train: Tensor, labels: Tensor, val: Tensor, answers: Tensor, device: torch.device) -> dict[str, Any]:
    """Search λ with both, and compare the objectives at every λ."""
    objectives: dict[float, list[float]] = {}

    def ours() -> tuple[float, dict[float, float]]:
        problem = LogisticRegression(train.to(device), labels.to(device))
        strength, tried, fits = problem.search(val.to(device), answers.to(device), "accuracy")
        for other, fit in fits.items():
            weight, bias = fit.weight.cpu(), fit.bias.cpu()
            objectives.setdefault(other, []).append(objective(train, labels, weight, bias, other))
        return strength, tried

    def theirs(strengths: list[float]) -> list[float]:
        scores = []
        for strength in strengths:
            model = Theirs(C=1 / strength, max_iter=1000).fit(train.numpy(), labels.numpy())
            weight, bias = torch.from_numpy(model.coef_.T).float(), torch.from_numpy(model.intercept_).float()
            objectives.setdefault(strength, []).append(objective(train, labels, weight, bias, strength))
            scores.append(100 * model.score(val.numpy(), answers.numpy()))
        return scores

    seconds, (best, tried) = timed(ours, device)
    their_seconds, (their_best, their_tried) = timed(lambda: search_strength(theirs), torch.device("cpu"))
    both = [values for values in objectives.values() if len(values) == 2]
    return {
        "seconds": seconds,
        "sklearn_seconds": their_seconds,
        "ratio": their_seconds / seconds,
        "lambda": best,
        "sklearn_lambda": their_best,
        "validation": tried[best],
        "sklearn_validation": their_tried[their_best],
        # scikit-learn's objective relative to ours at every λ; negative: lower than ours
        "sklearn_objective_excess": [float(f"{b / a - 1:.3g}") for a, b in both],
    }


def objective(features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor, strength: float) -> float:
    loss = torch.nn.functional.cross_entropy(features @ weight + bias, labels, reduction="sum")
    return float(loss.double() + strength / 2 * weight.double().square().sum())


def neighbours(train: Tensor, labels: Tensor, test: Tensor, answers: Tensor, device: torch.device) -> dict[str, Any]:
    """Score four k in one pass, against brute force with the weighted vote in numpy."""
    ks = (10, 20, 100, 200)
    classes = int(labels.max()) + 1
    on_device = [tensor.to(device) for tensor in (train, labels, test, answers)]
    knn_accuracy(on_device[0][:512], on_device[1][:512], on_device[2][:64], on_device[3][:64], ks)  # warm up
    seconds, ours = timed(lambda: knn_accuracy(*on_device, ks), device)

    def theirs() -> dict[int, float]:
        finder = NearestNeighbors(n_neighbors=max(ks), algorithm="brute", metric="cosine", n_jobs=-1).fit(train.numpy())
        distance, index = finder.kneighbors(test.numpy())
        weight, voted = np.exp((1 - distance) / 0.07), labels.numpy()[index]
        top1 = {}
        for k in ks:
            votes = np.zeros((len(test), classes))
            np.add.at(votes, (np.arange(len(test))[:, None], voted[:, :k]), weight[:, :k])
            top1[k] = 100 * float((votes.argmax(1) == answers.numpy()).mean())
        return top1

    their_seconds, expected = timed(theirs, torch.device("cpu"))
    return {
        "seconds": seconds,
        "sklearn_seconds": their_seconds,
        "ratio": their_seconds / seconds,
        "top1": {k: scores["top1"] for k, scores in ours.items()},
        "sklearn_top1": expected,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--tests", type=int, default=1000)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--classes", type=int, default=50)
    parser.add_argument("--noise", type=float, default=6.0)
    parser.add_argument("--knn-images", type=int, default=0, help="training images of k-NN (default: --images)")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")  # scikit-learn warns at 1,000 iterations; the objectives show it
    device = torch.device(options.device)
    train, labels = make_features(options.images, options.width, options.classes, options.noise, 1)
    test, answers = make_features(options.tests, options.width, options.classes, options.noise, 2)
    gallery, gallery_labels = make_features(
        options.knn_images or options.images, options.width, options.classes, options.noise, 3
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    LogisticRegression(train[:200].to(device), labels[:200].to(device)).fit(1.0)  # warm up
    result = {
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "sklearn": sklearn.__version__,
        "arguments": vars(options),
        "logistic": logistic(train, labels, test, answers, device),
        "knn": neighbours(gallery, gallery_labels, test, answers, device),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
