"""PROBES: one line per probe of ``frugalvit probe``. Nothing here imports torch."""

from typing import NamedTuple


class ProbeCommand(NamedTuple):
    """A probe: its class in ``frugalvit.config``, its function in ``frugalvit``, and one line of help."""

    config: str
    function: str
    help: str


# fmt: off
# ruff: noqa: E501
PROBES = {
    "knn": ProbeCommand("probe:KnnConfig", "probing.knn:knn", "k nearest neighbours on frozen features"),
    "linear": ProbeCommand("probe:LinearConfig", "probing.linear:linear", "a linear classifier on frozen features, by SGD"),
    "logistic": ProbeCommand("probe:LogisticConfig", "probing.logistic:logistic", "logistic regression on frozen features, with a search over λ"),
    "suite": ProbeCommand("probe:SuiteConfig", "probing.suite:suite", "the 18 datasets of EsViT's Table 9, those that are present"),
}
# fmt: on
