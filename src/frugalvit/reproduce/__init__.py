"""The tables of docs/RESULTS.md as data, and what reruns them."""

from frugalvit.reproduce.command import reproduce as reproduce
from frugalvit.reproduce.table_specs import TABLES as TABLES
