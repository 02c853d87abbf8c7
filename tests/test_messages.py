import pytest

from headrace.comm.errors import MessageRefused
from headrace.comm.messages import MESSAGES, GroupId, PartFilled, RowId, SlotWanted, Stop, decode, encode
from headrace.comm.offer import Offer


def test_what_is_encoded_is_decoded():
    for message in (
        Stop(reason="done"),
        SlotWanted(1, Offer(7, 256, 1, 2, 1, ((0, 64), (128, 256)))),
        PartFilled(2, Offer(7, 256, 1), 3, "ab" * 16),
    ):
        assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "body",
    [b"", b"\x80\x04K\x01.", b"[]", b'{"type":"Unknown"}', b'{"type":"Stop"}', b'{"type":"Stop","reason":3}', b"\xff"],
)
def test_what_is_no_message_is_refused(body):
    with pytest.raises(MessageRefused):
        decode(body)


def test_every_message_has_a_name_of_its_own():
    assert len({message.__name__ for message in MESSAGES}) == len(MESSAGES)


def test_ids_read_as_epoch_prompt_sample():
    assert (str(RowId(1, 2, 3)), str(GroupId(1, 2))) == ("1.2.3", "1.2")
