"""Members of tar files: where tarfile finds them, damage named, hostile headers bounded."""

import tarfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frugalvit.data import open_data
from frugalvit.data.webdataset.stream import ShardStream
from frugalvit.data.webdataset.tar import BadShard, list_members, read_members
from frugalvit.errors import UserError
from helpers.shards import png, write_tar


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_characters="\0\n"), min_size=1, max_size=150).map(
            lambda name: name.strip("/") or "x"
        ),
        st.binary(max_size=1500),
        max_size=5,
    ),
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_members_have_their_offsets_and_contents(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes], format_number: int
) -> None:
    path = write_tar(tmp_path_factory.getbasetemp() / "members.tar", files, format_number)
    members = list(list_members(path))
    content = path.read_bytes()
    with tarfile.open(path) as archive:
        expected = [(member.name, member.size, member.offset_data) for member in archive if member.isreg()]
    assert [(m.name, m.size, m.offset_data) for m in members] == expected
    assert [content[m.offset_data : m.offset_data + m.size] for m in members] == list(files.values())
    with path.open("rb") as stream:
        assert [content for _, content in read_members(stream, lambda member: True)] == list(files.values())


def long_name_header(content: bytes) -> bytes:
    """A header of a long name of 64 GB."""
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 64 << 30
    return header.tobuf(tarfile.GNU_FORMAT) + content


def negative_size(content: bytes) -> bytes:
    """A pax header with a negative size, which would send the reader backwards."""
    header = tarfile.TarInfo("x")
    header.pax_headers = {"size": "-2048"}
    return header.tobuf(tarfile.PAX_FORMAT) + content


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: b"", "truncated"),
        (lambda content: content[:700], "truncated"),
        (lambda content: content[:-9000], "truncated"),
        (lambda content: b"\x1f\x8b" + content[2:], "compressed"),
        (lambda content: b"not a tar at all" * 100, "not a tar"),
        (lambda content: content[:1024] + b"\xff" * 512 + content[1536:], "damaged"),
        (long_name_header, "impossible size"),
        (negative_size, "impossible size|damaged"),
    ],
)
def test_damage_is_named(tmp_path: Path, change, reason: str) -> None:
    path = write_tar(tmp_path / "a.tar", {f"{i}.png": png(i) for i in range(5)})
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(BadShard, match=reason):
        list(list_members(path))
    with path.open("rb") as stream, pytest.raises(BadShard, match=reason):
        list(read_members(stream, lambda member: True))


@settings(max_examples=80)
@given(st.binary(max_size=2000) | st.lists(st.tuples(st.integers(0, 3000), st.binary(max_size=8)), max_size=8))
def test_fuzzed_shards(tmp_path_factory: pytest.TempPathFactory, damage: bytes | list[tuple[int, bytes]]) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.tar"
    if isinstance(damage, bytes):
        path.write_bytes(damage)
    else:
        write_tar(path, {"a.png": png(1), "a.json": b'{"label": 1}', "b.png": png(2), "b.txt": b"x"})
        content = bytearray(path.read_bytes())
        for position, patch in damage:
            content[position : position + len(patch)] = patch
        path.write_bytes(bytes(content))
    try:
        for examples in open_data(path).splits.values():
            for i in range(len(examples)):
                examples.read(i)
    except UserError as error:
        message = str(error)
    else:
        message = "fine"
    assert "\n" not in message
    with suppress(UserError):
        list(ShardStream([str(path)], [2]).epoch())
