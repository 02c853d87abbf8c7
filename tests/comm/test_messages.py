"""Control messages: their encoding, and the ids of rows and groups."""

import pytest

from headrace.comm.errors import MessageRefused
from headrace.comm.messages import GroupId, OpenPushLink, RowId, RowRef, RowsStreamed, Stop, decode, encode
from headrace.comm.messages.base import trajectory_group


def test_a_message_is_decoded_as_it_was_encoded():
    for message in (
        Stop(reason="done"),
        OpenPushLink("actor-0>relay-0", "tcp", "/proc/1/fd/3"),
    ):
        assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "body",
    [b"", b"\x80\x04K\x01.", b"[]", b'{"type":"Unknown"}', b'{"type":"Stop"}', b'{"type":"Stop","reason":3}', b"\xff"],
)
def test_bytes_that_are_not_a_message_are_refused(body):
    with pytest.raises(MessageRefused):
        decode(body)


def test_a_report_of_first_tokens_with_a_whole_row_is_refused():
    begun = RowRef(RowId(1, 2, 3), 1, ["relay-0#1"], version=0, num_tokens=5, is_partial=True)
    body = encode(RowsStreamed([begun, begun]))
    assert decode(body) == RowsStreamed([begun, begun])
    with pytest.raises(MessageRefused, match=r"row 1\.2\.3 is not partial"):
        decode(body.replace(b"true", b"false", 1))


def test_ids_read_as_epoch_prompt_sample():
    assert (str(RowId(1, 2, 3)), str(GroupId(1, 2))) == ("1.2.3", "1.2")


@pytest.mark.parametrize("row", [RowId(1, 2, 3), RowId(1, 2, 3, is_evaluation=True)])
def test_a_key_names_its_row_and_attempt(row: RowId):
    assert RowId.of_key(row.key(4)) == RowId.of_key(row.partial_key(4)) == (row, 4)
    assert row.group.row(3) == row


def test_trajectories_have_different_numbers_and_those_of_one_group_share_their_high_bits():
    last = RowId(0, 0, 4095).number
    assert last != RowId(0, 1, 0).number
    assert RowId(3, 2, 1).number != RowId(3, 2, 1, is_evaluation=True).number
    assert trajectory_group(last) == trajectory_group(RowId(0, 0, 0).number) != trajectory_group(RowId(0, 1, 0).number)
    assert RowId(2**15 - 1, 2**35 - 1, 4095, is_evaluation=True).number == 2**63 - 1


@pytest.mark.parametrize("row", [RowId(0, 0, 4096), RowId(0, 2**35, 0), RowId(2**15, 0, 0), RowId(0, 0, -1)])
def test_a_name_that_does_not_fit_into_its_number_is_refused(row):
    with pytest.raises(AssertionError, match=str(row)):
        _ = row.number
