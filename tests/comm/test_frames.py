"""Frames: a message comes as it was sent, whatever idle frames come before it; what breaks their form is refused."""

import msgspec
import numpy as np
import pytest
from support.readers import BytesLink

from headrace.comm.errors import LinkBroken, MessageRefused
from headrace.comm.links.frames import (
    MAX_BYTES,
    decode_frame,
    encode_frame,
    receive_frame,
    send_data,
    send_frame,
    send_idle,
)

NUMBERS = msgspec.msgpack.Decoder(list[int])


def test_a_message_comes_as_it_was_sent_after_idle_frames():
    link = BytesLink()
    send_idle(link, 1.0)
    send_idle(link, 1.0)
    send_frame(link, [1, 2], 1.0)
    assert receive_frame(link, NUMBERS, 1.0) == [1, 2]


def test_the_bytes_behind_a_frame_are_found_at_its_end():
    data = np.concatenate([encode_frame([1, 2]), np.arange(3, dtype=np.uint8)])
    numbers, end = decode_frame(data, NUMBERS)
    assert numbers == [1, 2] and data[end:].tolist() == [0, 1, 2]


def test_a_message_of_another_type_data_and_a_frame_that_is_too_long_are_refused():
    other, data = BytesLink(), BytesLink()
    send_frame(other, "other", 1.0)
    send_data(data, np.zeros(3, np.uint8), 1.0)
    for link in (other, data):
        with pytest.raises(MessageRefused, match="malformed frame"):
            receive_frame(link, NUMBERS, 1.0)
    for kind, num_bytes in ((0, 1), (1, MAX_BYTES + 1), (1, -1), (3, 8)):
        with pytest.raises(MessageRefused, match=f"malformed frame: kind {kind}, {num_bytes} bytes"):
            receive_frame(BytesLink(np.array([kind, num_bytes]).tobytes()), NUMBERS, 1.0)


def test_a_frame_that_is_cut_off_ends_the_link_or_is_refused():
    cut = encode_frame([1, 2])[:-1]
    with pytest.raises(LinkBroken):
        receive_frame(BytesLink(cut.tobytes()), NUMBERS, 1.0)
    with pytest.raises(MessageRefused, match="malformed frame"):
        decode_frame(cut, NUMBERS)
