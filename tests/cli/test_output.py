"""Output whose reader is gone."""

import errno
import os

import pytest

from treewise.cli.output import EnduringStream


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO])
def test_a_stream_that_is_closed_at_its_other_end_goes_on_into_nothing(tmp_path, number):
    with (tmp_path / "out").open("w") as stream:

        def write(_text):
            raise OSError(number, os.strerror(number))

        gone = type("Gone", (), {"write": staticmethod(write), "fileno": stream.fileno})
        assert EnduringStream(gone).write("text") == 4
        assert os.readlink(f"/proc/self/fd/{stream.fileno()}") == os.devnull


def test_other_errors_of_a_stream_are_errors():
    def write(_text):
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        EnduringStream(type("Full", (), {"write": staticmethod(write)})).write("text")
