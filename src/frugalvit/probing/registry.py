"""The probes of ``frugalvit probe``: one line each. Nothing here imports torch."""

from __future__ import annotations

from typing import NamedTuple


class ProbeCommand(NamedTuple):
    """A probe: its configuration and its function as ``module:name``, and one line of help."""

    config: str
    function: str
    help: str


PROBES = {
    "knn": ProbeCommand(
        "frugalvit.config.probe:KnnConfig",
        "frugalvit.probing.knn:knn",
        "votes of the nearest training images on frozen features",
    ),
    "linear": ProbeCommand(
        "frugalvit.config.probe:LinearConfig",
        "frugalvit.probing.linear:linear",
        "a linear classifier on frozen features, by SGD",
    ),
    "logistic": ProbeCommand(
        "frugalvit.config.probe:LogisticConfig",
        "frugalvit.probing.logistic:logistic",
        "logistic regression on frozen features, regularisation searched",
    ),
    "suite": ProbeCommand(
        "frugalvit.config.probe:SuiteConfig",
        "frugalvit.probing.suite:suite",
        "the 18 datasets of EsViT's Table 9, those that are present",
    ),
}
