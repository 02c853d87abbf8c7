"""A run whose responses are nearly all cut at their longest length is warned of, once."""

from headrace.trainer.alarms.cut_responses import CutResponses


def test_five_steps_of_cut_responses_in_a_row_are_one_warning_that_names_the_setting():
    cuts = CutResponses(32)
    told = [cuts.warning(share) for share in (0.95, 0.95, 0.95, 0.95, 0.5, 1, 1, 1, 1, 1, 1, 1)]
    assert [number for number, text in enumerate(told) if text] == [9]
    assert "raise sampling.max_new_tokens=32" in told[9]
