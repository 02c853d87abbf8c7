"""Memory that processes share: what opens it, and what no other process can do to it."""

import os
from pathlib import Path

import pytest
from support.closing import at_end

from headrace.comm.errors import PeerGone
from headrace.comm.memfd import HEAD_BYTES, create_memory, file_in_memory, open_memory, path_of


def memory(num_bytes=None):
    """Memory of this process, and its path for others."""
    fd = create_memory("headrace test", num_bytes)
    at_end(lambda: os.close(fd))
    return fd, path_of(fd, os.getpid(), fd)


def test_what_one_descriptor_writes_another_one_reads():
    fd, path = memory()
    os.pwrite(fd, b"seen", HEAD_BYTES)
    other = open_memory(path)
    assert os.pread(other, 4, HEAD_BYTES) == b"seen"
    os.close(other)


def test_memory_that_is_gone_is_named():
    fd = create_memory("headrace test")
    path = path_of(fd, os.getpid(), fd)
    os.close(fd)
    with pytest.raises(PeerGone, match=f"no shared memory at {path.partition('#')[0]}"):
        open_memory(path)


@pytest.mark.parametrize(
    "form", ["{victim}#{token}", "{victim}", "/proc/1/../../{victim}#{token}", "", "/proc/1/fd/3#"]
)
def test_a_path_that_names_another_file_is_refused_and_the_file_stays_as_it_is(tmp_path, form):
    victim = tmp_path / "victim.txt"
    victim.write_text("thirty bytes of another program")
    token = memory()[1].partition("#")[2]
    with pytest.raises(PeerGone, match="shared-memory file|not the announced shared memory"):
        open_memory(form.format(victim=victim, token=token))
    assert victim.read_text() == "thirty bytes of another program"


def test_a_descriptor_of_a_file_is_refused_whatever_it_begins_with(tmp_path):
    token = memory()[1].partition("#")[2]
    with (tmp_path / "file").open("wb+") as file:
        file.write(bytes.fromhex(token))
        file.flush()
        with pytest.raises(PeerGone, match="shared-memory file|not the announced shared memory"):
            open_memory(f"/proc/{os.getpid()}/fd/{file.fileno()}#{token}")


def test_a_descriptor_that_belongs_to_other_memory_by_now_is_refused():
    (_, first), (_, second) = memory(), memory()
    with pytest.raises(PeerGone, match="shared-memory file|not the announced shared memory"):
        open_memory(f"{second.partition('#')[0]}#{first.partition('#')[2]}")


@pytest.mark.parametrize("num_bytes", [None, 100])
def test_nobody_can_take_pages_away(num_bytes):
    file = memory(num_bytes)[1].partition("#")[0]
    with pytest.raises(PermissionError):
        os.truncate(file, HEAD_BYTES - 1)


def test_memory_of_a_fixed_size_cannot_grow():
    fd, _ = memory(100)
    assert os.fstat(fd).st_size == HEAD_BYTES + 100
    with pytest.raises(PermissionError):
        os.ftruncate(fd, HEAD_BYTES + 101)


def test_a_file_in_memory_has_its_content_and_ends_with_its_context():
    with file_in_memory(b"a key") as path:
        assert Path(path).read_bytes() == b"a key"
    assert not Path(path).exists()
