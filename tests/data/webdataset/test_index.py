"""An index of a stranger is read with care."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frugalvit.data import open_data
from frugalvit.data.webdataset.index import FORMAT, parse_index
from helpers.shards import write_shards

SHARD = {"file": "train-0.tar", "examples": 1, "bytes": 2, "sha256": "x"}


def index_with(**values: object) -> bytes:
    return json.dumps({"format": FORMAT, "classes": ["a"], "splits": {"train": [SHARD]}} | values).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        json.dumps({"format": FORMAT}).encode(),
        index_with(format="another"),
        index_with(classes=7),
        index_with(splits=[]),
        index_with(splits={"train": [1]}),
        index_with(splits={"train": [SHARD | {"file": "../x.tar"}]}),
        index_with(splits={"train": [SHARD | {"file": "/etc/x.tar"}]}),
    ],
)
def test_an_invalid_index_is_ignored(tmp_path: Path, content: bytes) -> None:
    assert parse_index(content) is None and parse_index(index_with()) is not None
    write_shards(tmp_path / "s")
    (tmp_path / "s" / "index.json").write_bytes(content)
    assert len(open_data(tmp_path / "s", split="given")) == 12


@settings(max_examples=80)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["file", "x"]), inner, max_size=3),
        max_leaves=8,
    ),
    st.sampled_from(["classes", "splits", "train", "file", "examples"]),
)
def test_fuzzed_indexes(value: object, key: str) -> None:
    if key in SHARD:
        content = index_with(splits={"train": [SHARD | {key: value}]})
    else:
        content = index_with(**({"splits": {"train": value}} if key == "train" else {key: value}))
    index = parse_index(content)
    assert index is None or all("/" not in shard.file and shard.examples >= 0 for shard in index.by_name.values())
