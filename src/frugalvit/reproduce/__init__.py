"""The tables of docs/RESULTS.md as data, and what reruns them."""

from frugalvit.reproduce.running import reproduce as reproduce
from frugalvit.reproduce.tables import TABLES as TABLES
